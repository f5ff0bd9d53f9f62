"""Requirement 8: three doors. Agents that are called, that fetch their episodes, and that just talk.

A lease is the same under its key, is kept by signs of life, and goes to another agent without them; a talk key is
refused within a second of its revocation; a key that is over is refused before its body is read.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from gspo_core.api_answers import EpisodeLease
from gspo_core.client import ApiError
from tests.play.requirements.asking import DIALECTS, KEY_HEADERS, PATHS, Answered, Asker, body
from tests.play.requirements.figures import Figure
from tests.play.requirements.place import TASKS, WAIT_S, Place, TooLate, fetched
from tests.play.requirements.texts import sentence

LEASES, TALKS, BUDGETS = 6, 24, 4
SHORT_LEASE_S = 5.0
"""The shortest that there is."""
LONG_LEASE_S = 300.0
LATE_S = 4.0
"""Beyond a lease's end, within which it is another's."""
REVOKED_S = 1.0
FORBIDDEN, OVER = 401, 409
TO_REFUSAL = "s from a revocation to the refusal, at most"
LARGE_BYTES = 12 << 20
HEAD_WAIT_S = 10.0


def doors(place: Place) -> Figure:
    figure = Figure(
        8,
        "three doors",
        "services that are called; leases that are asked for again under their key, kept by signs of life and by "
        "turns, left alone until they are over, given back and ended; talk keys that are revoked in mid-talk, expire, "
        "or are used up; then each ended key with the head of a body that never comes",
    )
    rng = random.Random(f"{place.seed} doors")
    called = {"ref": TASKS, "config": {"what": "called", "number": 9}, "agent": {"url": f"{place.beside.url}/play"}}
    ended = _called(figure, place, called)
    with (
        place.job("doors", [fetched("doors")], groups_per_step=4) as job,
        httpx.Client(trust_env=False) as http,
        ThreadPoolExecutor(LEASES) as threads,
    ):
        door = _Doors(figure, place, http, job)
        seeds = [rng.getrandbits(48) for _ in range(LEASES)]
        ended |= {key: OVER for keys in threads.map(door.leased, seeds) for key in keys}
        for one in door.met.values():
            place.client.release_lease(one)
        ended |= dict.fromkeys(door.talked(rng), FORBIDDEN)
        _refused_at_head(figure, place, ended, rng)
    figure.held = (
        f"after a revocation a request is refused within {figure.many.get(TO_REFUSAL, 0):.3f} s; "
        f"{figure.told('ended keys refused before their body')} of {len(ended)} ended keys are refused "
        "before their body"
    )
    return figure


def _called(figure: Figure, place: Place, entry: Mapping[str, Any]) -> dict[str, int]:
    """Each start brings an episode of its own; the keys are over with it."""
    keys = list[str]()
    place.beside.starts.clear()

    def serve(given: Mapping[str, Any]) -> Mapping[str, Any]:
        keys.append(given["api_key"])
        place.keys.update((given["api_key"], given["reward_key"]))
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}
        headers = {"authorization": f"Bearer {given['api_key']}"}
        answer = httpx.post(f"{given['base_url']}/chat/completions", json=asked, headers=headers, trust_env=False)
        figure.expect(answer.status_code == 200, f"a called agent was refused: {answer.text}")
        return {"reward": 0.5}

    place.beside.service = serve
    with place.job("called", [dict(entry)], steps=3, groups_per_step=2) as job:
        place.until(lambda: place.client.job(job)["status"] in ("succeeded", "failed"), "called agents have played")
        num_trained = len([*place.client.episodes(job)])
    figure.count("called", num_trained)
    figure.expect(num_trained == 12, f"{num_trained} of 12 called episodes were trained")
    starts = place.beside.starts
    figure.expect(len(set(starts)) == len(starts) == len(set(keys)), f"{len(starts)} starts of {len(set(keys))} keys")
    return dict.fromkeys(keys, OVER)


@dataclass(frozen=True)
class Asked:
    """A request, by the clock."""

    began: float
    status: int
    ended: float


def late(asked: Sequence[Asked], revoked: float) -> int:
    """How many were begun when the key was revoked, and were answered all the same."""
    return sum(one.began > revoked and one.status == 200 for one in asked)


@dataclass(frozen=True)
class _Doors:
    figure: Figure
    place: Place
    http: httpx.Client
    job: str
    met: dict[str, EpisodeLease] = field(default_factory=dict)
    """By its episode: what was fetched on the search for an episode of one's own. It may be the other search's."""

    def leased(self, seed: int) -> list[str]:
        """The keys of leases that are over."""
        rng, client, figure = random.Random(seed), self.place.client, self.figure
        name, keys = f"{seed:x}", list[str]()
        first, _ = self._lease(name, SHORT_LEASE_S)
        again, is_again = self._lease(name, SHORT_LEASE_S)
        figure.count("leases")
        figure.expect(is_again and again == first, "a lease that was asked for again under its key is another one")
        figure.count("asked for again under their key")
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * SHORT_LEASE_S:  # kept by one or the other
            if rng.random() < 0.5:
                client.extend_lease(first, lease_s=SHORT_LEASE_S)
            else:
                self._expect_turn(first, rng)
            time.sleep(rng.uniform(0.3, 0.5) * SHORT_LEASE_S)
        self._expect_turn(first, rng)
        figure.count("kept beyond their length")
        other = self._left_alone(first)
        keys.append(first["api_key"])
        self._expect_turn(other, rng)
        keys.append(self._ended(other, rng))
        return keys

    def _left_alone(self, first: EpisodeLease) -> EpisodeLease:
        """Another agent gets the same episode with a new key, and the old one is refused."""
        figure, silent = self.figure, time.monotonic()
        deadline = silent + WAIT_S
        while (found := self.met.pop(first["episode"], None)) is None:
            if (other := self.place.lease_once(self.job, lease_s=LONG_LEASE_S, wait_s=1.0)) is not None:
                self.met[other["episode"]] = other
            elif time.monotonic() > deadline:
                raise TooLate(f"{first['episode']} was not to be had again")
        took = time.monotonic() - silent
        figure.count("expired")
        figure.largest("s until another has it, at most", took)
        is_in_time = SHORT_LEASE_S - 0.5 <= took <= SHORT_LEASE_S + LATE_S
        figure.expect(is_in_time, f"a lease of {SHORT_LEASE_S:g} s was another's after {took:.1f} s")
        figure.expect(found["api_key"] != first["api_key"], "the next agent has the key of the one before")
        refused = self._ask(first, random.Random(0))
        figure.expect(refused.status == OVER, f"the key of a lease that ran out is answered {refused.status}")
        self._expect_over("finish_lease", first)
        return found

    def _ended(self, lease: EpisodeLease, rng: random.Random) -> str:
        """By its end, or given back; either is said once, and what is said again is refused or says the same."""
        name = rng.choice(("finish_lease", "release_lease"))
        getattr(self.place.client, name)(lease)
        self.figure.count("ended" if name == "finish_lease" else "given back")
        self.place.until(lambda: self._ask(lease, rng).status == OVER, f"the key is over behind {name}")
        self._expect_over("extend_lease", lease)
        return lease["api_key"]

    def _expect_over(self, name: str, lease: EpisodeLease) -> None:
        try:
            getattr(self.place.client, name)(lease)
        except ApiError as error:
            self.figure.expect(error.code == "lease_over", f"{name} of a lease that is over: {error}")
        else:
            self.figure.expect(False, f"{name} of a lease that is over is answered")

    def _lease(self, name: str, lease_s: float) -> tuple[EpisodeLease, bool]:
        """Under this key; and whether it was had before."""
        url, deadline = f"{self.place.up.api_url}/v1/jobs/{self.job}/episodes:lease", time.monotonic() + WAIT_S
        answer = None
        while answer is None or answer.status_code == 204:
            if time.monotonic() > deadline:
                raise RuntimeError("no episode was to be had")
            params, headers = {"lease_s": lease_s, "wait_s": 20}, {"idempotency-key": name}
            answer = self.http.post(url, params=params, headers=headers, timeout=60)
        answer.raise_for_status()
        found: EpisodeLease = answer.json()
        self.place.keys |= {found["api_key"], found["reward_key"]}
        return found, answer.headers.get("idempotent-replayed") == "true"

    def _ask(self, lease: EpisodeLease, rng: random.Random) -> Answered:
        asker = Asker(self.http, lease["base_url"], lease["api_key"])
        dialect = rng.choice(DIALECTS)
        return asker.ask(dialect, body(dialect, [("user", sentence(rng))], most=4))

    def _expect_turn(self, lease: EpisodeLease, rng: random.Random) -> None:
        answer = self._ask(lease, rng)
        self.figure.expect(answer.is_answer, f"a lease that is held is answered {answer.status}: {answer.fault}")

    def talked(self, rng: random.Random) -> list[str]:
        """The keys that are over."""
        keys = [self._revoked(random.Random(rng.getrandbits(48))) for _ in range(TALKS)]
        for number in range(BUDGETS):
            self._used_up(number + 1, rng)
        return [*keys, self._expired(rng)]

    def _revoked(self, rng: random.Random) -> str:
        """While somebody talks with it without a pause."""
        made = self.place.client.make_talk_key(self.job, label="doors")
        self.place.keys.add(made["key"])
        asker = Asker(self.http, self.place.up.gateway_url, made["key"])
        with ThreadPoolExecutor(1) as threads:
            talking = threads.submit(self._talk_on, asker, random.Random(rng.getrandbits(48)))
            time.sleep(rng.uniform(0.1, 0.6))
            self.place.client.revoke_talk_key(self.job, made["id"])
            revoked = time.monotonic()
            asked = talking.result()
        figure, last = self.figure, asked[-1]
        figure.count("talk keys revoked")
        figure.count("requests that were begun behind a revocation, and answered", late(asked, revoked))
        figure.largest(TO_REFUSAL, last.ended - revoked)
        figure.expect(not late(asked, revoked), "a request that was begun behind a revocation is answered")
        figure.expect(last.status == FORBIDDEN, f"a revoked key is answered {last.status}")
        is_in_time = last.ended - revoked <= REVOKED_S
        figure.expect(is_in_time, f"a key was refused {last.ended - revoked:.1f} s after its revocation")
        return made["key"]

    def _talk_on(self, asker: Asker, rng: random.Random) -> list[Asked]:
        """Until it is refused."""
        asked, until = list[Asked](), time.monotonic() + 10 * REVOKED_S
        while time.monotonic() < until and (not asked or asked[-1].status == 200):
            began = time.monotonic()
            asked.append(Asked(began, self._talk(asker, rng, is_over=True).status, time.monotonic()))
        return asked

    def _used_up(self, turns: int, rng: random.Random) -> None:
        made = self.place.client.make_talk_key(self.job, turns=turns)
        self.place.keys.add(made["key"])
        asker = Asker(self.http, self.place.up.gateway_url, made["key"])
        for _ in range(turns):
            self._talk(asker, rng)
        refused = self._talk(asker, rng, is_over=True)
        self.figure.count("talk keys used up")
        is_named = refused.status == 400 and "used up its turns" in refused.fault
        self.figure.expect(is_named, f"behind its {turns} turns a key is answered {refused.status}: {refused.fault}")

    def _expired(self, rng: random.Random) -> str:
        made = self.place.client.make_talk_key(self.job, days=2.0 / 86_400)
        self.place.keys.add(made["key"])
        asker = Asker(self.http, self.place.up.gateway_url, made["key"])
        self._talk(asker, rng)
        self.place.until(lambda: self._talk(asker, rng, is_over=True).status == FORBIDDEN, "a talk key expires", 10.0)
        self.figure.count("talk keys expired")
        return made["key"]

    def _talk(self, asker: Asker, rng: random.Random, *, is_over: bool = False) -> Answered:
        dialect = rng.choice(DIALECTS)
        answer = asker.ask(dialect, body(dialect, [("user", sentence(rng))], most=4))
        if not is_over:
            self.figure.expect(answer.is_answer, f"a talk key is answered {answer.status}: {answer.fault}")
        return answer


def _refused_at_head(figure: Figure, place: Place, ended: Mapping[str, int], rng: random.Random) -> None:
    for key, status in ended.items():
        found, took = status_at_head(place.up.gateway_url, rng.choice(DIALECTS), key)
        is_it = figure.expect(
            found == status, f"with the head of a body alone an ended key is answered {found or 'nothing'}"
        )
        figure.count("ended keys refused before their body", is_it)
        figure.largest("s to that refusal, at most", took)


def status_at_head(url: str, dialect: str, key: str) -> tuple[int, float]:
    """What a request is answered whose large body does not come; 0 for nothing. And after how many seconds."""
    parts, began = urlsplit(url), time.monotonic()
    header = KEY_HEADERS.get(dialect)
    named = f"authorization: Bearer {key}" if header is None else f"{header}: {key}"
    head = (
        f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: {parts.netloc}\r\n{named}\r\ncontent-type: application/json\r\n"
        f"content-length: {LARGE_BYTES}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=HEAD_WAIT_S) as stream:
        stream.sendall(head.encode())
        try:
            line = stream.recv(64)
        except TimeoutError:
            return 0, time.monotonic() - began
    return int(line.split()[1]) if line.startswith(b"HTTP/") else 0, time.monotonic() - began
