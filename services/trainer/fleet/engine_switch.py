"""Moves one engine from one version to the next: pause, load, verify, resume, each with a deadline.

    JOINING -> PAUSING -> LOADING -> RESUMING -> READY    a load verifies the label the engine then reports
    unknown weights -> DIRTY                              paused, gets no requests, loaded again once it answers
    no connection   -> GONE                               after a restart it would hold other weights
    long silence    -> GONE

Rule: send ``continue`` only to an engine that holds what its label says; only a full, verified load leaves DIRTY.
`engines` decides which engine should hold what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from gspo_core.versions import EngineLabel
from services.engines.protocol import (
    Engine,
    EngineDirty,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    PauseMode,
)
from services.process.telemetry import get_logger
from services.state.fleet_records import EngineState
from services.state.heard_engines import HeardEngines
from services.trainer.fleet.weight_transport import WeightTransport

T = TypeVar("T")
WeightSync = Literal["retract", "in_place"]


@dataclass(frozen=True)
class Deadlines:
    """Seconds, set generously: missing one means giving up the engine for now, with all it holds."""

    answer_s: float = 30.0
    pause_s: float = 30.0
    load_s: float = 600.0


@dataclass
class SwitchCosts:
    """Total cost of one engine's switches."""

    num_switches: int = 0
    paused_s: float = 0.0
    last_paused_s: float = 0.0
    tokens_prefilled_again: int = 0
    """Tokens whose keys and values pauses dropped, according to the engine's snapshots."""
    tokens_lost: int = 0
    """Tokens of requests that a pause had to abort."""

    def __add__(self, other: SwitchCosts) -> SwitchCosts:
        """``last_paused_s`` is that of the longer pause."""
        return SwitchCosts(
            num_switches=self.num_switches + other.num_switches,
            paused_s=self.paused_s + other.paused_s,
            last_paused_s=max(self.last_paused_s, other.last_paused_s),
            tokens_prefilled_again=self.tokens_prefilled_again + other.tokens_prefilled_again,
            tokens_lost=self.tokens_lost + other.tokens_lost,
        )


@dataclass(eq=False)
class BoundEngine:
    """An engine this job holds."""

    client: Engine
    context_tokens: int = 0
    """The longest sequence that it samples; 0 where it does not say."""
    state: EngineState = EngineState.JOINING
    label: str = ""
    """Label of the weights it certainly holds; empty while unknown."""
    reason: str = ""
    """Why it is not READY."""
    silent_since: float | None = None
    """When it first left a call without an answer; it is told nothing until it answers again."""
    costs: SwitchCosts = field(default_factory=SwitchCosts)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def version(self) -> int:
        """Version of the weights it holds; call only while that is known."""
        return EngineLabel.parse(self.label).version

    def distrust(self, state: EngineState, reason: str) -> None:
        """Treat the engine's weights as unknown from now on."""
        if self.state is not state:
            get_logger().warning("engine", engine=self.url, state=state.value, label=self.label, reason=reason)
        self.state, self.reason, self.label = state, reason, ""


async def switch(
    engine: BoundEngine,
    path: Path,
    label: str,
    sync: WeightSync,
    deadlines: Deadlines,
    transport: WeightTransport,
) -> bool:
    """Whether the engine now holds ``label`` and is READY. ``path`` and ``label`` belong to one staged version."""
    before = engine.label
    try:
        mode = await _mode(engine, label, sync, deadlines)
        engine.state, engine.reason = EngineState.PAUSING, ""
        started = time.monotonic()
        held = await _held_tokens(engine, deadlines)
        await _within(deadlines.pause_s, engine.client.pause(mode), "pause")
        engine.state = EngineState.LOADING
        load = transport.load(engine.client, path, label, flush=mode != "in_place", timeout_s=deadlines.load_s)
        await _within(deadlines.load_s, load, "load")
        engine.state = EngineState.RESUMING
        await _within(deadlines.answer_s, engine.client.resume(), "resume")
    except EngineRejected as refusal:
        if engine.state is EngineState.RESUMING:  # the new weights are in it
            engine.distrust(EngineState.DIRTY, str(refusal))
            return False
        # Nothing was replaced: resume with the old weights if they were known.
        return await _go_on(engine, before, str(refusal), deadlines)
    except EngineUnavailable as lost:
        engine.distrust(EngineState.GONE, str(lost))
        return False
    except EngineError as error:
        if isinstance(error, _NoAnswer):
            engine.silent_since = time.monotonic()
        engine.distrust(EngineState.DIRTY, str(error))
        return False
    _count(engine.costs, mode, held, time.monotonic() - started)
    engine.state, engine.label, engine.reason = EngineState.READY, label, ""
    get_logger().info("engine switched", engine=engine.url, label=label, paused_s=engine.costs.last_paused_s)
    return True


async def still_holds(engine: BoundEngine, deadlines: Deadlines, heard: HeardEngines | None = None) -> bool:
    """Check that a READY engine still holds its weights: a restarted engine is back at its first ones. It is asked
    unless another process has just seen that it does."""
    label = engine.label
    if heard is not None and await heard.label(engine.url) == label:
        return True
    problem: EngineError | None = None
    try:
        held = (await _within(deadlines.answer_s, engine.client.info(), "info")).label
    except EngineError as error:
        held, problem = label, error  # slow is not gone
    if engine.state is not EngineState.READY or engine.label != label:
        return True  # meanwhile switching to other weights, which the switch verifies
    if isinstance(problem, EngineUnavailable):
        engine.distrust(EngineState.GONE, str(problem))
        return False
    if isinstance(problem, _NoAnswer) and engine.silent_since is None:
        engine.silent_since = time.monotonic()
    if held != label:
        engine.distrust(EngineState.DIRTY, f"holds {held!r} instead of {label!r}: it was restarted")
    return held == label


async def listen(engine: BoundEngine, *, within_s: float, give_up_after_s: float) -> None:
    """Ask a silent engine whether it answers again. It is GONE when it cannot be reached or was silent for too long."""
    assert engine.silent_since is not None
    try:
        await _within(within_s, engine.client.info(), "info")
    except EngineUnavailable as lost:
        engine.distrust(EngineState.GONE, str(lost))
    except _NoAnswer:
        if (silent_s := time.monotonic() - engine.silent_since) >= give_up_after_s:
            engine.distrust(EngineState.GONE, f"it has not answered for {silent_s:.0f} s")
    except EngineError:
        engine.silent_since = None
    else:
        engine.silent_since = None


async def _mode(engine: BoundEngine, label: str, sync: WeightSync, deadlines: Deadlines) -> PauseMode:
    """How to pause: keep requests of this job, abort those of another job."""
    if engine.state is EngineState.READY:
        return sync
    held = EngineLabel.parse_or_none((await _within(deadlines.answer_s, engine.client.info(), "info")).label)
    is_ours = held is not None and held.job == EngineLabel.parse(label).job
    return "retract" if is_ours and sync == "retract" else "abort"


async def _go_on(engine: BoundEngine, before: str, reason: str, deadlines: Deadlines) -> bool:
    if not before:
        engine.distrust(EngineState.DIRTY, reason)
        return False
    try:
        await _within(deadlines.answer_s, engine.client.resume(), "resume")
    except EngineError as error:
        if isinstance(error, _NoAnswer):
            engine.silent_since = time.monotonic()
        engine.distrust(EngineState.DIRTY, str(error))
        return False
    engine.state, engine.label, engine.reason = EngineState.READY, before, reason
    get_logger().warning("engine stays on its previous weights", engine=engine.url, label=before, reason=reason)
    return False


async def _held_tokens(engine: BoundEngine, deadlines: Deadlines) -> int:
    try:
        return (await _within(deadlines.answer_s, engine.client.load(), "load")).num_held_tokens
    except (EngineRejected, EngineProtocolError):
        return 0


def _count(costs: SwitchCosts, mode: PauseMode, held_tokens: int, paused_s: float) -> None:
    costs.num_switches += 1
    costs.paused_s += paused_s
    costs.last_paused_s = paused_s
    costs.tokens_prefilled_again += held_tokens if mode == "retract" else 0
    costs.tokens_lost += held_tokens if mode == "abort" else 0


class _NoAnswer(EngineDirty):
    """A deadline has passed."""


async def _within(seconds: float, call: Awaitable[T], what: str) -> T:
    """Run ``call`` with a deadline; once it passes, the engine's state is unknown."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise _NoAnswer(f"no answer to {what} within {seconds:g} s") from error
