"""Requirement 10: privacy. Marked texts go through talk keys with a redactor, and through episodes; all is searched.

What is searched: every key of Redis by its type, every file of the data directory (weights left out), the logs of all
processes at `debug`, and Redis' own files once these were written anew. What is open must be found before it is erased,
or nothing is shown by not finding it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis

from gspo_core.api_answers import EpisodeLease, ErasedEpisodes
from gspo_core.client import ApiError
from services.files.batch_log import BatchLog
from tests.play.requirements import search
from tests.play.requirements.asking import (
    CHAT,
    DIALECTS,
    GEMINI,
    MESSAGES,
    RESPONSES,
    Asker,
    Body,
    Function,
    Said,
    body,
)
from tests.play.requirements.figures import Figure
from tests.play.requirements.place import Place, fetched
from tests.play.requirements.search import FILES, LOGS, PLACES, REDIS, REDIS_FILES, Digits, Found, Search
from tests.play.requirements.texts import sentence
from tests.play.run import qwen_codec

TALKS, EPISODES = 12, 16
USERS = 3
GROUPS_PER_STEP, CHECKPOINT_EVERY = 2, 2
NUM_STEPS = EPISODES // (2 * GROUPS_PER_STEP)


@dataclass
class Spoken:
    """What was said in one conversation, by its marks."""

    user: str = ""
    secrets: list[str] = field(default_factory=list)
    opens: list[str] = field(default_factory=list)
    trace: str = ""
    episode: str = ""

    def marks(self) -> set[Digits]:
        return {search.digits_of(one) for one in self.opens}


def named(dialect: str, given: Body, user: str) -> Body:
    """In the name of a user, where the dialect has a field for it."""
    fields: Mapping[str, Body] = {
        CHAT: {"user": user},
        RESPONSES: {"safety_identifier": user},
        MESSAGES: {"metadata": {"user_id": user}},
    }
    return given | fields.get(dialect, {})


def entered_due(rows: Sequence[tuple[str, int]], saved: int) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Of episodes and the steps whose logs have them: those to be erased, and those that are not yet."""
    erased = {one for one in rows if one[1] <= saved}
    return erased, set(rows) - erased


def privacy(place: Place) -> Figure:
    figure = Figure(
        10,
        "privacy",
        "marked texts through talk keys with a redactor, in each dialect, whole and streamed, and through episodes; "
        "then every key of Redis by its type, the data directory and the logs of all processes are searched, for the "
        "keys of all plays too; a trace, users and episodes are erased: trained, waiting, and while they are played",
    )
    rng = random.Random(f"{place.seed} privacy")
    entry = fetched("privacy")
    changes = {"groups_per_step": GROUPS_PER_STEP, "checkpoint_every": CHECKPOINT_EVERY}
    with httpx.Client(trust_env=False) as http, redis.Redis.from_url(place.up.redis_url) as server:
        with place.job("privacy", [entry], **changes) as job:
            play = _Play(figure, place, http, server, job)
            talks = play.talk(rng)
            play.expect_redacted(talks)
            play.erase_talks(talks)
            play.erase_episodes(rng)
        play.expect_no_keys()
    told = figure.told
    figure.held = (
        f"{told('redacted texts found')} hits of {told('texts to be redacted')} redacted texts; "
        f"{told('erased texts found')} of {told('texts erased')} erased texts in what Redis answers, in files "
        f"and logs, and {told('erased texts in Redis own files')} in Redis' own files behind their rewrite; "
        f"{told('keys in logs and files')} keys in logs and files"
    )
    return figure


@dataclass
class _Play:
    figure: Figure
    place: Place
    http: httpx.Client
    server: Any
    """Redis itself."""
    job: str

    def __post_init__(self) -> None:
        encode = qwen_codec().tokenizer.encode
        self._search = Search([encode(str(digit))[0] for digit in range(10)])

    # talk keys

    def talk(self, rng: random.Random) -> list[Spoken]:
        made = self.place.client.make_talk_key(self.job, label="privacy")
        self.place.keys.add(made["key"])
        asker = Asker(self.http, self.place.up.gateway_url, made["key"])
        users = [search.mark(rng, search.USER) for _ in range(USERS)]
        talks = list[Spoken]()
        for number in range(TALKS):
            dialect = DIALECTS[number % len(DIALECTS)]
            talks.append(Spoken(user="" if dialect == GEMINI else users[number % USERS]))
            self._converse(asker, dialect, talks[-1], rng)
        for user in users:
            for trace in self.place.client.traces(self.job, user=user):
                self.figure.expect(trace["is_redacted"], "a trace is not redacted")
        return talks

    def _converse(self, asker: Asker, dialect: str, spoken: Spoken, rng: random.Random) -> None:
        """Two turns, with marks in whatever may hold text."""
        said: list[Said] = [("system", self._marked(spoken, rng))]
        tools = [Function("lookup", self._marked(spoken, rng))] if rng.random() < 0.5 else []
        for number in range(2):
            said.append(("user", self._marked(spoken, rng)))
            given = named(dialect, body(dialect, said, tools), spoken.user)
            if number and rng.random() < 0.5:
                answer, _ = asker.streamed(dialect, given)
                is_answered, fault = answer.status_code == 200, answer.text
                spoken.trace = answer.headers.get("x-gspo-trace", spoken.trace)
            else:
                told = asker.ask(dialect, given)
                is_answered, fault = told.is_answer, told.fault
                spoken.trace = told.trace or spoken.trace
                said.append(("assistant", told.text))
            self.figure.expect(is_answered, f"a plain request was refused: {fault}")
        self.figure.count("conversations")

    def _marked(self, spoken: Spoken, rng: random.Random) -> str:
        spoken.secrets.append(search.mark(rng, search.SECRET))
        spoken.opens.append(search.mark(rng, search.OPEN))
        return f"{sentence(rng)} {spoken.secrets[-1]} {sentence(rng)} {spoken.opens[-1]}"

    def expect_redacted(self, talks: Sequence[Spoken]) -> None:
        held = self._look()
        secrets = {search.digits_of(text) for one in talks for text in one.secrets}
        opens = {mark for one in talks for mark in one.marks()}
        for where, found in held.items():
            hits = len(found.marks & secrets)
            self.figure.count("redacted texts found", hits)
            self.figure.expect(not hits, f"{hits} redacted texts stand in {where}")
        self.figure.count("texts to be redacted", len(secrets))
        is_seen = opens <= held[REDIS].marks
        self.figure.expect(is_seen, f"{len(opens - held[REDIS].marks)} texts that are kept were not found in Redis")
        self.figure.count("texts that are kept, found", len(opens & held[REDIS].marks))

    def erase_talks(self, talks: Sequence[Spoken]) -> None:
        """One conversation, then all of a user."""
        client, first = self.place.client, talks[0]
        client.erase_trace(self.job, first.trace)
        self._expect_code("trace_not_found", lambda: client.trace(self.job, first.trace), "an erased trace")
        user = talks[1].user
        client.erase_user(self.job, user)
        left = [*client.traces(self.job, user=user)]
        self.figure.expect(not left, f"{len(left)} traces of an erased user are listed")
        erased = [first, *(one for one in talks if one.user == user)]
        self._expect_erased({mark for one in erased for mark in one.marks()} | {search.digits_of(user)}, "talk traffic")
        kept = {mark for one in talks if one not in erased for mark in one.marks()}
        missing = len(kept - self._look()[REDIS].marks)
        self.figure.expect(not missing, f"{missing} texts of others are gone with what was erased")

    # episodes

    def erase_episodes(self, rng: random.Random) -> None:
        users = [search.mark(rng, search.USER) for _ in range(USERS + 1)]
        played = [self._play(Spoken(user=users[number % len(users)]), rng)[0] for number in range(EPISODES)]
        self.place.until(lambda: self._saved() >= NUM_STEPS, "what was played is in a checkpoint")
        waiting, _ = self._play(Spoken(user=users[0]), rng)
        running, lease = self._play(Spoken(user=users[0]), rng, ends=False)
        all_of_them = {mark for one in (*played, waiting, running) for mark in one.marks()}
        held = self._look()
        missing = len(all_of_them - held[REDIS].marks - held[FILES].marks)
        self.figure.expect(not missing, f"{missing} texts of episodes were not found before they were erased")
        self._erase_one(next(one for one in played if one.user == users[-1]))
        self._erase_user(users[0], [*played, waiting, running], {waiting.episode, running.episode})
        self._expect_over(lease)
        kept = {mark for one in played if one.user in users[1:-1] for mark in one.marks()}
        missing = len(kept - self._look()[FILES].marks)
        self.figure.expect(not missing, f"{missing} texts of others are gone with what was erased")

    def _play(self, spoken: Spoken, rng: random.Random, *, ends: bool = True) -> tuple[Spoken, EpisodeLease]:
        lease = self.place.lease(self.job)
        spoken.episode = lease["episode"]
        dialect = rng.choice([one for one in DIALECTS if one != GEMINI])  # which names no user
        self._converse(Asker(self.http, lease["base_url"], lease["api_key"]), dialect, spoken, rng)
        spoken.opens += spoken.secrets  # nothing of an episode is redacted
        if ends:
            self.place.client.finish_lease(lease, round(rng.random(), 3))
        self.figure.count("episodes")
        return spoken, lease

    def _saved(self) -> int:
        """The step of the newest checkpoint."""
        return max((one["step"] for one in self.place.client.checkpoints(self.job)), default=0)

    def _logged(self, user: str = "", episode: str = "") -> Iterator[tuple[str, int]]:
        """The episodes in batch logs, with their step: those of a user, or one."""
        log = BatchLog(self.place.job_dir(self.job))
        for epoch, step in log.steps():
            for group in log.read(epoch, step).groups:
                for one in group:
                    is_users = any(segment.user == user for segment in one.segments)
                    if str(one.key) == episode or (user and is_users):
                        yield str(one.key), step

    def _erase_one(self, spoken: Spoken) -> None:
        due = {*self._logged(episode=spoken.episode)}
        told = self.place.client.erase_episode(spoken.episode)
        self.figure.expect(_entered(told, "erased") == due, f"an episode of {due} is erased in {told['erased']}")
        self.figure.count("steps listed", len(due))
        try:
            self.place.client.episode(spoken.episode)
        except ApiError as error:
            self.figure.expect(error.code == "episode_erased", f"an erased episode is answered with {error}")
        else:
            self.figure.expect(False, "an erased episode is shown")
        self.place.client.erase_episode(spoken.episode)  # harmless
        self._expect_erased(spoken.marks(), "a trained episode")

    def _erase_user(self, user: str, everything: Sequence[Spoken], queued: set[str]) -> None:
        client, saved = self.place.client, self._saved()
        erased, not_yet = entered_due([*self._logged(user)], saved)
        told = client.erase_episodes(self.job, user)
        self.figure.expect(_entered(told, "erased") == erased, f"{told['erased']} are erased, and {erased} were due")
        self.figure.expect(_entered(told, "not_yet") == not_yet, f"{told['not_yet']} are not yet, {not_yet} were due")
        self.figure.expect({*told["queued"]} == queued, f"{told['queued']} were in the queue, and {queued} were due")
        self.figure.expect(not told["in_use"] and not told["unreadable"], f"{told['in_use']} {told['unreadable']}")
        self.figure.count("steps listed", len(erased))
        self.figure.count("in the queue, ended", len(queued))
        listed = [*client.episodes(self.job, user=user)]
        self.figure.expect(not listed, f"{len(listed)} episodes of an erased user are listed by the name")
        theirs = {mark for one in everything if one.user == user for mark in one.marks()}
        self._expect_erased(theirs | {search.digits_of(user)}, "a user's episodes")

    def _expect_over(self, lease: EpisodeLease) -> None:
        """What the API and the gateway answer to whoever plays an episode that was erased."""
        asker = Asker(self.http, lease["base_url"], lease["api_key"])
        answer = asker.ask(CHAT, body(CHAT, [("user", "And now?")]))
        is_told = answer.status == 409 and "erased" in answer.fault
        self.figure.expect(is_told, f"the agent of an erased episode is answered {answer.status}: {answer.fault}")
        self._expect_code("lease_over", lambda: self.place.client.extend_lease(lease), "the lease of an erased episode")
        try:
            shown = json.dumps(self.place.client.episode(lease["episode"]))
        except ApiError as error:
            self.figure.expect(error.status == 404, f"an erased episode that was played is answered {error}")
        else:
            found = self._search.of(shown.encode()).marks
            self.figure.expect(not found, f"the API still shows {len(found)} texts of an erased episode")

    def _expect_code(self, code: str, call: Any, what: str) -> None:
        try:
            call()
        except ApiError as error:
            self.figure.expect(error.code == code, f"{what} is answered {error}")
        else:
            self.figure.expect(False, f"{what} is answered as if it were there")

    # what is found

    def _look(self) -> dict[str, Found]:
        found = search.in_files(self._search, self.place.data.path)
        found[REDIS], types = search.in_redis(self._search, self.server.execute_command)
        for name, number in types.items():
            self.figure.largest(f"keys of Redis searched: {name}", number)
        return found

    def _expect_erased(self, marks: set[Digits], what: str) -> None:
        """Redis' own files lose it when they are written anew, the pages say."""
        self._write_anew()
        held = self._look()
        self.figure.count("texts erased", len(marks))
        for where in PLACES:
            hits = len(held[where].marks & marks)
            self.figure.count("erased texts in Redis own files" if where == REDIS_FILES else "erased texts found", hits)
            self.figure.expect(not hits, f"{what}: {hits} of {len(marks)} erased texts stand in {where}")

    def _write_anew(self) -> None:
        """Without compression, so that what is in the file can be found."""
        self.place.until(self._is_quiet, "Redis has written its file")
        self.server.execute_command("CONFIG", "SET", "rdbcompression", "no")
        self.server.execute_command("BGREWRITEAOF")
        self.place.until(self._is_quiet, "Redis has written its file anew")

    def _is_quiet(self) -> bool:
        told = self.server.info("persistence")
        return not told["aof_rewrite_in_progress"] and not told["aof_rewrite_scheduled"]

    def expect_no_keys(self) -> None:
        """Of all plays. Redis has those of episodes that wait to be fetched, as the pages say, and no talk key."""
        known = {key.encode() for key in self.place.keys}
        self.figure.count("keys that were given out", len(known))
        missed = [key for key in known if self._search.of(b" " + key + b" ").keys != {key}]
        self.figure.expect(not missed, f"{len(missed)} keys would not be found")
        held = self._look()
        for where in (LOGS, FILES):
            hits = len(held[where].keys)
            self.figure.count("keys in logs and files", hits)
            self.figure.expect(not hits, f"{hits} keys stand in {where}")
        for where in (REDIS, REDIS_FILES):
            talk = [key for key in held[where].keys if key.startswith(b"tk_")]
            self.figure.expect(not talk, f"{len(talk)} talk keys stand in {where}")
            self.figure.count(f"keys of fetched episodes in {where}", len(held[where].keys) - len(talk))


def _entered(told: ErasedEpisodes, name: str) -> set[tuple[str, int]]:
    rows: Any = told[name]  # type: ignore[literal-required]
    return {(one["episode"], one["step"]) for one in rows}
