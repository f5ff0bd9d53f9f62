"""The state of a scripted engine: requests that wait, run, are retracted or frozen, weights, and a cache of prefixes.

Rule: it behaves as the real server (``docs/engines.md``) was seen to behave, also where that is unpleasant: aborts
match live ids by prefix, a request posted while paused is unknown until the engine goes on, a retracted request that
is aborted loses its tokens, an update can fail although the weights were replaced, some input ends it. One tick is one
token for each running request; ticks come from a timer or from ``advance``. HTTP is not known here.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.apparatus.scripted_engine import language

Script = Callable[[list[int]], Sequence[int] | None]
"""Prompt -> the ids to answer with, or None to sample."""


class Died(Exception):
    """The process would be gone: no answer, and none to come."""


class DuplicateId(Exception):
    """A request of this id is live."""


class Replaced(Exception):
    """The weights are new, but the cache could not be flushed: the server answers 400 and keeps the old label."""


@dataclass
class Fault:
    """Something goes wrong with the next ``times`` calls to ``path`` after the first ``after`` of them.

    ``drop`` cuts the connection, ``error`` answers 500, ``refuse`` 400, ``hang`` never answers, ``die`` ends the
    engine, ``garbage`` answers something else than a generation, ``skew`` moves the last log-prob.
    """

    path: str
    kind: Literal["drop", "error", "refuse", "hang", "die", "garbage", "skew"]
    after: int = 0
    times: int = 1

    def strikes(self, path: str) -> bool:
        if path != self.path or self.times <= 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


@dataclass(eq=False)
class Ask:
    """One request and all that became of it."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    space: str | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(label, first token sampled under it)"""
    state: bytes | None = None
    """What was read so far; None while it has no keys and values."""
    states: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    num_retractions: int = 0
    finish: dict[str, Any] | None = None
    planned: list[int] | None = None
    rng: random.Random = field(default_factory=random.Random)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def spans(self, label: str) -> list[dict[str, Any]]:
        ends = [start for _, start in self.marks[1:]] + [len(self.output_ids)]
        tiles = [(name, start, end) for (name, start), end in zip(self.marks, ends, strict=False) if end > start]
        return [{"version": n, "start": s, "end": e} for n, s, e in tiles or [(label, 0, 0)]]


class ScriptedEngine:
    """``tick_s`` seconds pass between two tokens; None: only when a test says ``advance``.

    With ``max_tokens`` it has memory for so many keys and values: what does not fit waits, and what grows beyond it is
    retracted, the youngest first. A token that is read takes ``prefill_s``.
    """

    def __init__(
        self,
        weights: Path | str,
        *,
        seed: int = 0,
        vocab_size: int = 300,
        context_length: int = 512,
        max_running: int = 64,
        max_tokens: int | None = None,
        prefill_s: float = 0.0,
        profile: str = "0.5.23",
        tick_s: float | None = 0.0,
        script: Script | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.weights = str(weights)
        """What samples. A label is only a name for it."""
        self.first_weights = self.shown_weights = str(weights)
        self.label = self.shown_label = "default"
        """The scheduler's and the front end's: they differ after ``Replaced``."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self.architectures = ["Scripted"]
        self.layout: dict[str, int | str] = {"tp_size": 1, "dp_size": 1, "pp_size": 1}
        self.profile = tuple(int(part) for part in profile.split("."))
        self.script = script
        self.faults = list(faults)
        self.lies = False
        """Takes the label of an update and keeps its weights."""
        self.paused: str | None = None
        self.session_open = False
        self.dead = asyncio.Event()
        self.running: list[Ask] = []
        self.waiting: list[Ask] = []
        self.num_ticks = self.num_prefilled = self.num_generated = 0
        self._seed, self._tick_s, self._max_running = seed, tick_s, max_running
        self._max_tokens, self._prefill_s = max_tokens, prefill_s
        self._prefixes: list[tuple[str | None, list[int], list[bytes]]] = []
        self._admitting = True
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Ticks by itself until cancelled. Not needed when a test turns the clock."""
        while self._tick_s is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._has_work()))
            num_before = self.num_prefilled
            await self.advance(1)
            await asyncio.sleep(self._tick_s + self._prefill_s * (self.num_prefilled - num_before))

    async def advance(self, num_ticks: int) -> None:
        """So many tokens for everything that runs."""
        for _ in range(num_ticks):
            if self._has_work():
                self._tick()
            await self._notify()

    def kill(self) -> None:
        """As SIGKILL does: nobody gets an answer any more."""
        self.dead.set()

    async def generate(self, ask: Ask) -> Ask:
        async with self._changed:  # held before it is known: an abort does not find it
            await self._changed.wait_for(lambda: self.paused is None)
        if any(ask.rid == other.rid for other in self._live()):
            raise DuplicateId(ask.rid)
        ask.rng = random.Random(f"{self._seed}/{ask.rid}")
        ids = self.script(list(ask.prompt)) if self.script else None
        ask.planned = None if ids is None else list(ids)
        self.waiting.append(ask)
        await self._notify()
        try:
            await ask.done.wait()
        finally:
            self._drop(ask)
        return ask

    async def score(self, ids: list[int]) -> list[float]:
        """Of each id but the first, under what it really holds."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.paused is None)
        return language.true_logprobs(self.weights, ids[:1], ids[1:], 1.0, self.vocab_size)

    def abort(self, rid: str) -> None:
        """Nothing for an id that is not live; else everything whose id starts with it."""
        if any(ask.rid == rid for ask in self._live()):
            for ask in [ask for ask in self._live() if ask.rid.startswith(rid)]:
                self._abort(ask)

    def abort_all(self) -> None:
        for ask in self._live():
            self._abort(ask)

    async def pause(self, mode: str) -> None:
        self.paused = mode
        if mode == "abort":
            for ask in self._live():
                self._finish(ask, _ABORTED)
        elif mode == "retract":
            for ask in self.running:
                self._retract(ask)
            self.waiting[:0] = self.running
            self.running.clear()
        await self._notify()

    async def resume(self) -> None:
        self.paused = None
        for ask in list(self.running):
            if ask.finish is not None:
                self._finish(ask, ask.finish)
        await self._notify()

    async def flush(self, timeout_s: float = 0.0) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self.running)
        except TimeoutError:
            return False
        self._prefixes.clear()
        return True

    async def update(self, weights: str, label: str | None, *, flush: bool) -> None:
        """Raises ``Replaced``, or ``Died`` in the profiles where a failed flush ends the process."""
        self._admitting = False
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.running or self.paused is not None)
        finally:
            self._admitting = True
        if not self.lies:
            self.weights = weights
        self._relabel(label or self.label)
        if flush and self.running:
            if self.profile < (0, 5, 22):
                self.kill()
                raise Died
            raise Replaced
        if flush:
            self._prefixes.clear()
        self.shown_label, self.shown_weights = self.label, weights
        await self._notify()

    async def relabel(self, label: str) -> None:
        self._relabel(label)
        self.shown_label = label
        await self._notify()

    def load(self) -> dict[str, Any]:
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(self.running),
            "num_waiting_reqs": len(self.waiting),
            "num_used_tokens": self._num_used(),
            "max_running_requests": self._max_running,
        }

    def _has_work(self) -> bool:
        return self.paused is None and bool(self.running or (self.waiting and self._admitting))

    def _live(self) -> list[Ask]:
        return [*self.running, *self.waiting]

    def _tick(self) -> None:
        self.num_ticks += 1
        while self._admitting and self.waiting and self._fits(self.waiting[0]):
            ask = self.waiting.pop(0)
            self._prefill(ask)
            self.running.append(ask)
        for ask in list(self.running):
            self._sample(ask)
        while self._max_tokens is not None and len(self.running) > 1 and self._num_used() > self._max_tokens:
            self._retract(ask := self.running.pop())
            self.waiting.insert(0, ask)

    def _num_used(self) -> int:
        return sum(len(ask.prompt) + len(ask.output_ids) for ask in self.running)

    def _fits(self, ask: Ask) -> bool:
        if self._max_tokens is not None and self.running:
            num = len(ask.prompt) + len(ask.output_ids) + len(self.running) + 1
            if self._num_used() + num > self._max_tokens:
                return False
        return len(self.running) < self._max_running

    def _retract(self, ask: Ask) -> None:
        ask.state, ask.states = None, []
        ask.num_retractions += 1

    def _prefill(self, ask: Ask) -> None:
        tokens = [*ask.prompt, *ask.output_ids]
        states = self._longest_prefix(tokens[:-1], ask.space)
        if ask.cached_tokens is None:
            ask.cached_tokens = len(states)
        self.num_prefilled += len(tokens) - len(states)
        ask.state, ask.states = (states[-1] if states else language.EMPTY), list(states)
        for token_id in tokens[len(states) :]:
            self._read(ask, token_id)
        self._mark(ask)

    def _read(self, ask: Ask, token_id: int) -> None:
        assert ask.state is not None
        ask.state = language.read(ask.state, token_id, self.weights)
        ask.states.append(ask.state)

    def _sample(self, ask: Ask) -> None:
        if ask.output_ids and len(ask.states) < len(ask.prompt) + len(ask.output_ids):
            self._read(ask, ask.output_ids[-1])
        assert ask.state is not None
        values = language.logprobs(ask.state, self.weights, ask.temperature, self.vocab_size)
        if ask.planned is not None and len(ask.output_ids) < len(ask.planned):
            token_id = ask.planned[len(ask.output_ids)]
        elif ask.temperature == 0:
            token_id = int(values.argmax())
        else:
            token_id = ask.rng.choices(range(self.vocab_size), weights=list(2.718281828459045**values))[0]
        ask.output_ids.append(token_id)
        ask.logprobs.append(float(values[token_id]))
        self.num_generated += 1
        if token_id in ask.stop_token_ids:
            self._finish(ask, {"type": "stop", "matched": token_id})
        elif len(ask.output_ids) >= ask.max_new_tokens:
            self._finish(ask, {"type": "length", "length": len(ask.output_ids)})

    def _longest_prefix(self, tokens: list[int], space: str | None) -> list[bytes]:
        best: list[bytes] = []
        for held_space, held, states in self._prefixes:
            if held_space == space:
                common = next((i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), None)
                length = min(len(held), len(tokens)) if common is None else common
                best = max(best, states[:length], key=len)
        return best

    def _relabel(self, label: str) -> None:
        self.label = label
        for ask in self.running:
            self._mark(ask)

    def _mark(self, ask: Ask) -> None:
        if not ask.marks or ask.marks[-1][0] != self.label:
            ask.marks.append((self.label, len(ask.output_ids)))

    def _abort(self, ask: Ask) -> None:
        if ask in self.waiting:
            # What it had sampled before a retraction has not been handed to the front end yet, and is lost.
            ask.output_ids, ask.logprobs, ask.marks, ask.cached_tokens = [], [], [], None
            self._finish(ask, {"type": "abort", "message": "Abort in waiting queue"})
        elif self.paused == "in_place":
            ask.finish = _ABORTED  # told when the engine goes on
        else:
            self._finish(ask, _ABORTED)

    def _finish(self, ask: Ask, finish: dict[str, Any]) -> None:
        ask.finish = finish
        if ask.states:
            tokens = [*ask.prompt, *ask.output_ids][: len(ask.states)]
            self._prefixes.append((ask.space, tokens, ask.states))
        self._drop(ask)
        ask.done.set()

    def _drop(self, ask: Ask) -> None:
        for queue in (self.running, self.waiting):
            if ask in queue:
                queue.remove(ask)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


_ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
