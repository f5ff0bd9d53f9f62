"""Plays episodes without a model: random calls that fit the tools, and what the environment answers to each.

Rule: the same seed gives the same calls, so that two episodes can be compared word by word.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gspo_core.env import (
    CallStatus,
    Environment,
    EnvironmentFailed,
    ParsedTurn,
    Session,
    Timeouts,
    ToolCall,
)
from gspo_core.json_value import JSON
from gspo_core.messages import Content, Message, other_parts
from gspo_core.testing.random_calls import Action
from gspo_core.types import StopReason

T = TypeVar("T")
BLOCKING_S = 1.0
"""Other episodes of the same process would notice."""


@dataclass
class Transcript:
    """The answers and the reward of an episode."""

    first: str = ""
    answers: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    """The text of each answer."""
    other_parts: list[str] = field(default_factory=list)
    """What is shown besides text, with its place."""
    stop: StopReason | None = None
    reward: float = 0.0
    close_failure: str | None = None
    durations_s: dict[str, list[float]] = field(default_factory=dict)

    def same_as(self, other: Transcript) -> bool:
        return (self.first, self.answers, self.stop, self.reward) == (
            *(other.first, other.answers, other.stop, other.reward),
        )

    def difference(self, other: Transcript) -> str:
        """Where the two part, in a few words."""
        if self.first != other.first:
            return f"first messages: {_parting(self.first, other.first)}"
        for number, (one, another) in enumerate(zip(self.answers, other.answers, strict=False)):
            if one != another:
                return f"answer {number}: {_parting(one, another)}"
        return f"end: {self.stop}, reward {self.reward} / {other.stop}, reward {other.reward}"


@dataclass
class RehearsalStage:
    """Where an examination stands, for the thread that watches it."""

    act: str = "loading it"
    num_beats: int = 0
    """Signs of life: turns of the event loop that makes the calls, and the acts that begin before it runs."""
    blocked: tuple[str, float] | None = None
    """The call that held this loop up longest, and for how long."""

    def note_call(self, phase: str, seconds: float, beats_before: int) -> None:
        longest = 0.0 if self.blocked is None else self.blocked[1]
        if self.num_beats == beats_before and seconds > max(longest, BLOCKING_S):
            self.blocked = phase, seconds


class Rehearsal:
    """One episode, act by act."""

    def __init__(self, environment: Environment, timeouts: Timeouts, stage: RehearsalStage | None = None) -> None:
        self._stage = stage or RehearsalStage()
        self.session: Session = environment.session(limits=timeouts, episode_id="rehearsal")
        self.transcript = Transcript()
        self._paid = 0.0
        """What its turns were paid."""

    async def start(self, task: Mapping[str, JSON], seed: int = 0) -> None:
        start = await self._timed("reset", self.session.start(task, seed))
        self.transcript.first = _dump([start.messages, start.tools])
        self._note("the first messages", start.messages)

    async def act(self, action: Action) -> None:
        """Nothing once the episode has ended."""
        if self.transcript.stop is not None:
            return
        observation = await self._timed("step", self.session.act(as_turn(action)))
        self.transcript.answers.append(_dump([observation.messages, observation.stop_reason]))
        self.transcript.contents.append("".join(_text(message["content"]) for message in observation.messages))
        self._note("an answer", observation.messages)
        self.transcript.stop = observation.stop_reason
        self._paid += observation.reward or 0.0

    def _note(self, place: str, messages: Sequence[Message]) -> None:
        self.transcript.other_parts += [f"{place}: {kind}" for message in messages for kind in other_parts(message)]

    async def end(self, *, score: bool = True) -> Transcript:
        try:
            if score:
                reward, _ = await self._timed("score", self.session.score())
                self.transcript.reward = reward + self._paid
        finally:
            await self.session.close()
            self.transcript.close_failure = self.session.close_failure
        return self.transcript

    async def _timed(self, phase: str, awaitable: Awaitable[T]) -> T:
        begun, beats = time.perf_counter(), self._stage.num_beats
        try:
            return await awaitable
        finally:
            seconds = time.perf_counter() - begun
            self.transcript.durations_s.setdefault(phase, []).append(seconds)
            self._stage.note_call(phase, seconds, beats)


async def rehearse(
    environment: Environment,
    task: Mapping[str, JSON],
    actions: Sequence[Action],
    timeouts: Timeouts,
    *,
    chance: int = 0,
    stage: RehearsalStage | None = None,
) -> Transcript:
    """Raises ``EnvironmentFailed``. ``chance``: where the generators stand that a program shares."""
    seed_everything(chance)
    rehearsal = Rehearsal(environment, timeouts, stage)
    try:
        await rehearsal.start(task)
        for action in actions:
            await rehearsal.act(action)
    except EnvironmentFailed:
        await rehearsal.end(score=False)
        raise
    return await rehearsal.end()


def seed_everything(chance: int = 0) -> None:
    """The generators that a program shares, so that what still differs is not chance."""
    random.seed(chance)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(chance)


def as_turn(action: Action) -> ParsedTurn:
    if isinstance(action, str):
        return ParsedTurn(action)
    name, arguments = action
    return ParsedTurn("", (ToolCall(name, dict(arguments), CallStatus.OK, "", 0, 1),))


def _text(content: Content | None) -> str:
    return content if isinstance(content, str) else _dump(content)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _parting(one: str, another: str) -> str:
    """Both texts from a little before where they part."""
    same = next((i for i, (a, b) in enumerate(zip(one, another, strict=False)) if a != b), min(len(one), len(another)))
    begin = max(0, same - 20)
    return f"…{one[begin : begin + 60]}… / …{another[begin : begin + 60]}…"
