"""Runs the checks beside the caller, so that an environment that hangs is a finding and not a hang.

Rule: it ends in time whatever the author's code does, loading included. A thread that never comes back is left behind
as a daemon, and the place where it stands is the reason that is given; where that is none of the author's code, the
author is not blamed. Time in which the whole process stands still does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias, cast

from gspo_core.env import (
    AgentEnvironment,
    AgentStart,
    Environment,
    InvalidEnvironment,
    NeedsAgent,
    PlainEnvironment,
    Timeouts,
    load_environment,
)
from gspo_core.json_value import JSON
from gspo_core.testing.agent_checks import examine_agent
from gspo_core.testing.checks import Oracle, Subject, examine
from gspo_core.testing.prompts import PromptMeter
from gspo_core.testing.rehearsal import RehearsalStage
from gspo_core.testing.report import Check, EnvironmentReport, Status

_BEAT_S = 0.05
_TELLING_S = 5.0
# Beyond the longest deadline that the environment itself is held to.
_GRACE_S = 5.0
# Importing may take long.
_LOADING_S = 30.0
# A vocabulary of 150,000 tokens on a busy machine.
_TOKENIZER_S = 120.0
_OURS = str(Path(__file__).resolve().parents[1])
# One looks at a time: each turns the collector off and on again.
_looking = threading.Lock()
_MACHINERY = (_OURS, str(Path(asyncio.__file__).parent), threading.__file__)


Examined: TypeAlias = type | str | Environment | Callable[..., object]


class ExaminationWatcher:
    """Follows an examination. This one is told, and does nothing."""

    def found(self, check: Check) -> None: ...

    def still(self, act: str, seconds: float) -> None:
        """``act`` has lasted for so long."""


class EnvironmentRefused(AssertionError):
    """The environment must not train anything; the report says why."""

    def __init__(self, report: EnvironmentReport) -> None:
        super().__init__(f"\n{report}")
        self.report = report


def check_environment(
    environment: Examined,
    config: Mapping[str, JSON] | None = None,
    *,
    oracle: Oracle | None = None,
    timeout_s: float = 5.0,
) -> EnvironmentReport:
    """The report of a class, a reference or an environment; raises ``EnvironmentRefused`` where a check fails."""
    report = validate(environment, config, oracle=oracle, timeout_s=timeout_s)
    if not report.ok:
        raise EnvironmentRefused(report)
    return report


def validate(
    environment: Examined,
    config: Mapping[str, JSON] | None = None,
    *,
    oracle: Oracle | None = None,
    model: Path | None = None,
    timeout_s: float = 5.0,
    agent: Mapping[str, JSON] | None = None,
    witness: ExaminationWatcher | None = None,
) -> EnvironmentReport:
    """``agent``: how a job says that its agent is started; a function that can only be one needs no word.
    ``timeout_s`` bounds each phase for which the author's ``limits`` state no deadline. ``oracle`` may also be a
    static method of the class. ``witness`` is told of each finding as it is made, and of what takes long."""
    name = environment if isinstance(environment, str) else getattr(environment, "__qualname__", str(environment))
    start = None if agent is None else AgentStart.from_json(agent)
    load = partial(_as_environment, environment, config or {}, start)
    watched = _Watched(EnvironmentReport(str(name)), timeout_s, load, witness or ExaminationWatcher())
    watched.run(oracle, model)
    return watched.report


class _Watched:
    def __init__(
        self, report: EnvironmentReport, timeout_s: float, load: Callable[[], Environment], witness: ExaminationWatcher
    ) -> None:
        self.report = report
        self._witness = witness
        self._stage = RehearsalStage()
        self._timeout_s = timeout_s
        self._load = load
        self._longest_s = max(timeout_s, _LOADING_S)
        self._now = "loading"

    def run(self, oracle: Oracle | None, model: Path | None) -> None:
        thread = threading.Thread(target=self._work, args=(oracle, model), name="environment checks", daemon=True)
        thread.start()
        heard: tuple[int, FrameType | None] = (-1, None)
        silent_s, looked = 0.0, time.monotonic()
        act, act_began, told = self._stage.act, looked, looked
        while thread.is_alive():
            thread.join(_BEAT_S)
            now = time.monotonic()
            # A machine that is busy, or a library that holds up every thread, also makes this one look late.
            # Several members may block one after the other before the loop has its turn: each of them returns.
            signs = self._stage.num_beats, _author_frame(thread)
            is_silent = signs[0] == heard[0] and signs[1] is heard[1]
            silent_s = silent_s + min(now - looked, 2 * _BEAT_S) if is_silent else 0.0
            heard, looked = signs, now
            if self._stage.act != act:
                act, act_began, told = self._stage.act, now, now
            elif now - told >= _TELLING_S:
                told = now
                self._witness.still(act, now - act_began)
            if thread.is_alive() and silent_s > self._longest_s + _GRACE_S:
                self._add("responsive", Status.FAIL, self._silence(thread))
                return

    def _silence(self, thread: threading.Thread) -> str:
        place = _where(thread)
        if place is None:
            return f"the examination did not return for {self._longest_s:g}s, not in the environment's code: try again"
        return f"{self._now} does not return: {place}"

    def _work(self, oracle: Oracle | None, model: Path | None) -> None:
        try:
            environment = self._load()
        except InvalidEnvironment as error:
            self._add("load", Status.FAIL, str(error))
            return
        except Exception as error:  # e.g. of a form that is no class
            self._add("load", Status.FAIL, f"{type(error).__name__}: {error}")
            return
        meter = None
        if model is not None:
            self._stage.act = self._now = "loading the model's tokenizer"
            self._longest_s = max(self._longest_s, _TOKENIZER_S)
            self._stage.num_beats += 1
            try:
                meter = PromptMeter.load(model)
            except (OSError, ValueError) as error:
                self._add("prompt", Status.FAIL, f"the tokenizer of {model} cannot be used: {error}")
                return
        timeouts = timeouts_of(environment, self._timeout_s)
        self._now = "an async member blocks the event loop and"
        self._longest_s = max(timeouts.reset_timeout_s, timeouts.step_timeout_s, timeouts.score_timeout_s)
        self._stage.num_beats += 1
        subject = Subject(environment, timeouts, oracle or oracle_of(environment), meter, self._stage)
        try:
            asyncio.run(self._examine(subject))
        except Exception as error:
            self._add("episode", Status.FAIL, f"{type(error).__name__}: {error}")

    async def _examine(self, subject: Subject) -> None:
        beating = asyncio.create_task(self._keep_beating())
        try:
            environment = subject.environment
            checks = examine_agent(environment) if isinstance(environment, AgentEnvironment) else examine(subject)
            async for check in checks:
                self._note(check)
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _keep_beating(self) -> None:
        while True:
            self._stage.num_beats += 1
            await asyncio.sleep(_BEAT_S)

    def _add(self, check: str, status: Status, message: str) -> None:
        self._note(Check(check, status, message))

    def _note(self, check: Check) -> None:
        self.report.checks.append(check)
        self._witness.found(check)


def _as_environment(given: Examined, config: Mapping[str, JSON], agent: AgentStart | None) -> Environment:
    if isinstance(given, str):
        try:
            return load_environment(given, config, agent=agent)
        except NeedsAgent:
            return load_environment(given, config, agent=AgentStart())
    if hasattr(given, "session") and hasattr(given, "num_tasks"):
        return cast(Environment, given)
    return PlainEnvironment(given, config, name=getattr(given, "__qualname__", str(given)))


def timeouts_of(environment: Environment, timeout_s: float | None = None) -> Timeouts:
    """The author's deadlines; those that he leaves open are ``timeout_s``, without it those of a job."""
    usual = asdict(Timeouts() if timeout_s is None else Timeouts(timeout_s, timeout_s, timeout_s, timeout_s))
    return Timeouts(**{name: float(cast(float, environment.limits.get(name, usual[name]))) for name in usual})


def oracle_of(environment: Environment) -> Oracle | None:
    cls = getattr(environment, "cls", None)
    if not isinstance(inspect.getattr_static(cls, "oracle", None), staticmethod):
        return None  # a method of the instance is a tool
    oracle: Oracle = cls.oracle  # type: ignore[union-attr]
    return oracle


def _author_frame(thread: threading.Thread) -> FrameType | None:
    """The outermost call of code outside of this library that a thread is in; None where it is in none."""
    foreign = [frame for frame, _ in _stack_of(thread) if not frame.f_code.co_filename.startswith(_MACHINERY)]
    return foreign[-1] if foreign else None


def _where(thread: threading.Thread) -> str | None:
    """The innermost place outside of this library at which a thread stands; None where it stands in none."""
    for frame, line in _stack_of(thread):
        if not (file := frame.f_code.co_filename).startswith(_MACHINERY):
            return f"{Path(file).name}, line {line}, in {frame.f_code.co_name}"
    return None


def _stack_of(thread: threading.Thread) -> list[tuple[FrameType, int]]:
    """The calls that a thread is in, innermost first, each with its line. Without garbage being collected meanwhile: in
    Python 3.11 the first look at a call may collect, and while a collection lets the other thread run, what is looked
    at is gone (it stops for ever before 3.11.9, python/cpython#106883, or answers with some other object)."""
    with _looking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread.ident or -1)
            return list(traceback.walk_stack(frame)) if frame is not None else []
        finally:
            if was_enabled:
                gc.enable()
