"""Runs the checks beside the caller, so that an environment that hangs is a finding and not a hang.

Rule: it ends in time whatever the author's code does, loading included. A thread that never comes back is left behind
as a daemon, and the place where it stands is the reason that is given; where that is none of the author's code, the
author is not blamed. Time in which the whole process stands still does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
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
from gspo_core.testing.report import Check, EnvironmentReport, Status

_BEAT_S = 0.05
# Beyond the longest deadline that the environment itself is held to.
_GRACE_S = 5.0
# Importing may take long.
_LOADING_S = 30.0
# A vocabulary of 150,000 tokens on a busy machine.
_TOKENIZER_S = 120.0
_OURS = str(Path(__file__).resolve().parents[1])


Examined: TypeAlias = type | str | Environment | Callable[..., object]


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
) -> EnvironmentReport:
    """``agent``: how a job says that its agent is started; a function that can only be one needs no word.
    ``timeout_s`` bounds each phase for which the author's ``limits`` state no deadline. ``oracle`` may also be a
    static method of the class."""
    name = environment if isinstance(environment, str) else getattr(environment, "__qualname__", str(environment))
    start = None if agent is None else AgentStart.from_json(agent)
    load = partial(_as_environment, environment, config or {}, start)
    watched = _Watched(EnvironmentReport(str(name)), timeout_s, load)
    watched.run(oracle, model)
    return watched.report


class _Watched:
    def __init__(self, report: EnvironmentReport, timeout_s: float, load: Callable[[], Environment]) -> None:
        self.report = report
        self._timeout_s = timeout_s
        self._load = load
        self._num_beats = 0
        self._longest_s = max(timeout_s, _LOADING_S)
        self._now = "loading"

    def run(self, oracle: Oracle | None, model: Path | None) -> None:
        thread = threading.Thread(target=self._work, args=(oracle, model), name="environment checks", daemon=True)
        thread.start()
        heard, silent_s, looked = -1, 0.0, time.monotonic()
        while thread.is_alive():
            thread.join(_BEAT_S)
            now = time.monotonic()
            # A machine that is busy, or a library that holds up every thread, also makes this one look late.
            silent_s = silent_s + min(now - looked, 2 * _BEAT_S) if heard == self._num_beats else 0.0
            heard, looked = self._num_beats, now
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
            self._now, self._longest_s = "loading the model's tokenizer", max(self._longest_s, _TOKENIZER_S)
            self._num_beats += 1
            try:
                meter = PromptMeter.load(model)
            except (OSError, ValueError) as error:
                self._add("prompt", Status.FAIL, f"the tokenizer of {model} cannot be used: {error}")
                return
        timeouts = timeouts_of(environment, self._timeout_s)
        self._now = "an async member blocks the event loop and"
        self._longest_s = max(timeouts.reset_timeout_s, timeouts.step_timeout_s, timeouts.score_timeout_s)
        self._num_beats += 1
        subject = Subject(environment, timeouts, oracle or oracle_of(environment), meter)
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
                self.report.checks.append(check)
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _keep_beating(self) -> None:
        while True:
            self._num_beats += 1
            await asyncio.sleep(_BEAT_S)

    def _add(self, check: str, status: Status, message: str) -> None:
        self.report.checks.append(Check(check, status, message))


def _as_environment(given: Examined, config: Mapping[str, JSON], agent: AgentStart | None) -> Environment:
    if isinstance(given, str):
        try:
            return load_environment(given, config, agent=agent)
        except NeedsAgent:
            return load_environment(given, config, agent=AgentStart())
    if hasattr(given, "session") and hasattr(given, "num_tasks"):
        return cast(Environment, given)
    return PlainEnvironment(given, config, name=getattr(given, "__qualname__", str(given)))


def timeouts_of(environment: Environment, timeout_s: float) -> Timeouts:
    names = ("reset_timeout_s", "step_timeout_s", "score_timeout_s", "close_timeout_s")
    return Timeouts(**{name: float(cast(float, environment.limits.get(name, timeout_s))) for name in names})


def oracle_of(environment: Environment) -> Oracle | None:
    cls = getattr(environment, "cls", None)
    if not isinstance(inspect.getattr_static(cls, "oracle", None), staticmethod):
        return None  # a method of the instance is a tool
    oracle: Oracle = cls.oracle  # type: ignore[union-attr]
    return oracle


def _where(thread: threading.Thread) -> str | None:
    """The innermost place outside of this library at which a thread stands; None where it stands in none."""
    frame = sys._current_frames().get(thread.ident or -1)
    stack = traceback.extract_stack(frame) if frame is not None else []
    machinery = (_OURS, str(Path(asyncio.__file__).parent), threading.__file__)
    foreign = [entry for entry in stack if not entry.filename.startswith(machinery)]
    if not foreign:
        return None
    return f"{Path(foreign[-1].filename).name}, line {foreign[-1].lineno}, in {foreign[-1].name}"
