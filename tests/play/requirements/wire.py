"""Requirement 9: the wire. Numbers that one answer tells are those that another tells, and those of the episode.

``count_tokens`` is the prompt of the next request, ``message_start`` knows the prompt, spans of versions tile what was
sampled, and a model can be asked for by its name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from gspo_core.api_answers import EpisodeDetail, EpisodeLease
from tests.play.requirements.asking import (
    CHAT,
    DIALECTS,
    GEMINI,
    MESSAGES,
    RESPONSES,
    Answered,
    Asker,
    Body,
    Function,
    Said,
    body,
    of_chat_usage,
    of_gemini_usage,
    of_messages_usage,
    of_responses_usage,
    spans,
)
from tests.play.requirements.figures import Figure
from tests.play.requirements.place import Place, fetched
from tests.play.requirements.texts import sentence

EPISODES = 40
MOST_TURNS = 7
AT_ONCE = 3
COUNTING = {
    MESSAGES: ("/v1/messages/count_tokens",),
    GEMINI: ("/v1beta/models/policy:countTokens", "/v1/models/policy:countTokens"),
}
"""Of the dialects that have it: where prompts are counted."""
COUNTS = {MESSAGES: "input_tokens", GEMINI: "totalTokens"}
MODEL_PATHS = ("/v1/models", "/v1beta/models")
STRANGER = "gpt-of-nobody"


def tile(versions: Sequence[tuple[int, int, int]], sampled: int) -> str:
    """What is wrong with spans of so many tokens; empty where they tile them."""
    at = 0
    for start, end, _ in versions:
        if start != at or end <= start:
            return f"a span from {start} to {end} behind {at}"
        at = end
    return "" if at == sampled else f"{at} of {sampled} tokens have a version"


def spans_of(columns: Body, turn: int) -> tuple[tuple[int, int, int], ...]:
    """As the API lists the sampled tokens of a turn."""
    found = list[tuple[int, int, int]]()
    rows = zip(columns["turn"], columns["sampled"], columns["version"], strict=True)
    versions = [version for of_turn, is_sampled, version in rows if of_turn == turn and is_sampled]
    for place, version in enumerate(versions):
        if found and found[-1][2] == version:
            found[-1] = (found[-1][0], place + 1, version)
        else:
            found.append((place, place + 1, version))
    return tuple(found)


def streamed(dialect: str, told: Sequence[Body]) -> Answered:
    """The same numbers of an answer that came as events."""
    if dialect == CHAT:
        (last,) = (one for one in told if "policy_version" in one and one["choices"])
        usage = next(one["usage"] for one in told if one.get("usage"))
        return Answered(200, id=last["id"], versions=spans(last), **of_chat_usage(usage))
    if dialect == RESPONSES:
        whole = told[-1]["response"]
        return Answered(200, id=whole["id"], versions=spans(whole), **of_responses_usage(whole["usage"]))
    if dialect == MESSAGES:
        (begun,) = (one["message"] for one in told if one["type"] == "message_start")
        (end,) = (one for one in told if one["type"] == "message_delta")
        return Answered(200, id=begun["id"], versions=spans(end), **of_messages_usage(end["usage"]))
    last = told[-1]
    return Answered(200, id=last["responseId"], versions=spans(last), **of_gemini_usage(last["usageMetadata"]))


def prompt_at_start(told: Sequence[Body]) -> int:
    (begun,) = (one["message"]["usage"] for one in told if one["type"] == "message_start")
    return int(of_messages_usage(begun)["prompt"])


def wire(place: Place) -> Figure:
    figure = Figure(
        9,
        "wire",
        "conversations with drawn texts and tools, whole and streamed, in episodes and with talk keys, each turn in a "
        "drawn dialect; where the dialect counts prompts, each is counted first; models are asked for by their names",
    )
    rng = random.Random(f"{place.seed} wire")
    with (
        place.job("wire", [fetched("wire")], groups_per_step=1) as job,
        httpx.Client(trust_env=False) as http,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        player = _Player(figure, place, http, job)
        [*threads.map(player.play, [rng.getrandbits(48) for _ in range(EPISODES)])]
        talk = place.client.make_talk_key(job, label="wire")["key"]
        place.keys.add(talk)
        for _ in range(EPISODES // 2):
            player.converse(Asker(http, place.up.gateway_url, talk), random.Random(rng.getrandbits(48)))
        lease = place.lease(job)
        for key in (lease["api_key"], talk):
            _models(figure, Asker(http, place.up.gateway_url, key))
    told = figure.told
    figure.held = (
        f"{told('counts that are the next prompt')} of {told('prompts counted')} counts are "
        f"the next prompt; {told('starts that know the prompt')} of {told('message_start')} starts "
        f"know it; spans tile {told('answers tiled')} of {told('answers')} answers"
    )
    return figure


@dataclass(frozen=True)
class _Player:
    figure: Figure
    place: Place
    http: httpx.Client
    job: str

    def play(self, seed: int) -> None:
        rng, lease = random.Random(seed), self.place.lease(self.job)
        answers = self.converse(Asker(self.http, lease["base_url"], lease["api_key"]), rng)
        detail = self.place.client.episode(lease["episode"], tokens=True)
        for fault in _not_the_episode(detail, answers):
            self.figure.expect(False, fault)
        self.figure.count("episodes")
        self.figure.largest("versions", max((one for each in answers for *_, one in each.versions), default=0) + 1)
        self._finish(lease, rng)

    def _finish(self, lease: EpisodeLease, rng: random.Random) -> None:
        self.place.client.finish_lease(lease, round(rng.random(), 3))

    def converse(self, asker: Asker, rng: random.Random) -> list[Answered]:
        """Goes on, or begins anew, in a dialect that is drawn for each turn."""
        said, tools, answers = list[Said](), list[Function](), list[Answered]()
        for _ in range(rng.randint(2, MOST_TURNS)):
            if not said or rng.random() < 0.2:
                said = [("system", sentence(rng, 60))] if rng.random() < 0.7 else []
                tools = [Function(f"tool_{one}", sentence(rng)) for one in range(rng.choice((0, 0, 1, 4)))]
            said.append(("user", sentence(rng, rng.choice((4, 40, 200)))))
            answer = self._turn(asker, rng.choice(DIALECTS), rng, said, tools)
            if not self.figure.expect(answer.is_answer, f"a plain request was refused: {answer.fault}"):
                break
            answers.append(answer)
            said.append(("assistant", answer.text))
        return answers

    def _turn(
        self, asker: Asker, dialect: str, rng: random.Random, said: list[Said], tools: Sequence[Function]
    ) -> Answered:
        figure, given = self.figure, body(dialect, said, tools)
        counted = self._counted(asker, dialect, rng, given)
        if rng.random() < 0.5:
            answer = asker.ask(dialect, given)
        else:
            answer = self._streamed(asker, dialect, given)
            said.pop()  # what streams say is put together elsewhere: the next turn begins a branch
            said.append(("user", sentence(rng)))
        if not answer.is_answer:
            return answer
        figure.count("answers")
        wrong = tile(answer.versions, answer.sampled)
        figure.count("answers tiled", not wrong)
        figure.expect(not wrong, f"{dialect}: {wrong}")
        figure.count("answers of several versions", len(answer.versions) > 1)
        if counted is not None:
            figure.count("prompts counted")
            figure.count(f"prompts counted in {dialect}")
            is_it = figure.expect(counted == answer.prompt, f"{dialect} counts {counted}, and reads {answer.prompt}")
            figure.count("counts that are the next prompt", is_it)
        return answer

    def _counted(self, asker: Asker, dialect: str, rng: random.Random, given: Body) -> int | None:
        if dialect not in COUNTING:
            return None
        counted = asker.post(rng.choice(COUNTING[dialect]), _to_count(dialect, given, rng), asker.of(dialect))
        is_counted = self.figure.expect(counted.status_code == 200, f"{dialect} does not count: {counted.text}")
        return int(counted.json()[COUNTS[dialect]]) if is_counted else None

    def _streamed(self, asker: Asker, dialect: str, given: Body) -> Answered:
        asked = given | ({"stream_options": {"include_usage": True}} if dialect == CHAT else {})
        answer, told = asker.streamed(dialect, asked)
        if answer.status_code != 200:
            return Answered(answer.status_code, fault=answer.text)
        found = streamed(dialect, told)
        if dialect == MESSAGES:
            self.figure.count("message_start")
            start = prompt_at_start(told)
            is_it = self.figure.expect(start == found.prompt, f"message_start says {start}, the end {found.prompt}")
            self.figure.count("starts that know the prompt", is_it)
        return found


def _to_count(dialect: str, given: Body, rng: random.Random) -> Body:
    """As clients send it: without a bound of the answer, and one level deeper now and then."""
    if dialect == MESSAGES:
        return {name: value for name, value in given.items() if name != "max_tokens"}
    bare = {name: value for name, value in given.items() if name != "generationConfig"}
    return {"generateContentRequest": {"model": "models/policy", **bare}} if rng.random() < 0.5 else bare


def _not_the_episode(detail: EpisodeDetail, answers: Sequence[Answered]) -> Iterator[str]:
    columns: Any = detail["tokens"]
    for one in answers:
        if (found := spans_of(columns, one.turn)) != one.versions:
            yield f"{one.id}: the answer says {one.versions}, and the episode {found}"


def _models(figure: Figure, asker: Asker) -> None:
    """Each shape lists a model that can be asked for by the name in the list, and no other."""
    shapes = {
        "openai": ({"authorization": f"Bearer {asker.key}"}, "/v1/models"),
        "anthropic": ({"x-api-key": asker.key, "anthropic-version": "2023-06-01"}, "/v1/models"),
        "gemini": ({"x-goog-api-key": asker.key}, "/v1beta/models"),
        "gemini, v1": ({"x-goog-api-key": asker.key}, "/v1/models"),
    }
    for shape, (headers, path) in shapes.items():
        listed = asker.get(path, headers)
        if not figure.expect(listed.status_code == 200, f"models in the shape of {shape}: {listed.text}"):
            continue
        told = listed.json()
        for model in told.get("data") or told["models"]:
            name = model.get("id") or model["name"].removeprefix("models/")
            found = asker.get(f"{path}/{name}", headers)
            figure.count("models asked for by name")
            figure.expect(found.status_code == 200 and found.json() == model, f"{shape}, {name}: {found.text}")
        stranger = asker.get(f"{path}/{STRANGER}", headers)
        figure.count("names of no model")
        is_refused = stranger.status_code == 404 and STRANGER in stranger.text
        figure.expect(is_refused, f"{shape}: {STRANGER} is answered {stranger.status_code} {stranger.text}")
