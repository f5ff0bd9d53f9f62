"""``python -m gspo_core.testing ORDER``: what is asked of an environment, done in a process of its own.

Rule: what an environment prints is not mixed with the answer, and an environment that ends its process ends only this
one. ``ORDER`` is JSON, or the number of a descriptor that holds it; the answer is written, as JSON, to the descriptor
that it names. ``do`` says what is wanted: ``validate`` (the default), ``schema``, ``tasks``, ``prompts`` or ``play``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Literal, Required, TypedDict

from gspo_core.answer_parts import NOT_LOADED
from gspo_core.env import AgentStart, Environment, EnvironmentFailed, InvalidEnvironment, load_environment
from gspo_core.env.loading import UnreachableEnvironment
from gspo_core.environment_records import CheckRecord, JudgedRecord, Starts
from gspo_core.json_value import JSON
from gspo_core.outbound import guard_connections, parse_networks
from gspo_core.testing import excerpts
from gspo_core.testing.report import Check
from gspo_core.testing.watch import ExaminationWatcher, timeouts_of, validate
from gspo_core.types import Split

# Enough to meet a long one where they differ little, few enough for a person to wait.
NUM_PROMPTS = 16


class ExaminationOrder(TypedDict, total=False):
    """``do`` decides which of the others are there."""

    do: Literal["validate", "schema", "tasks", "play", "prompts"]
    ref: Required[str]
    config: Required[dict[str, JSON]]
    descriptor: Required[int]
    """Where the answer goes."""
    telling: int | None
    """A descriptor for what is found meanwhile, as lines of ``Told``: an examination can last for minutes."""
    networks: list[str] | None
    bounds: tuple[int, int] | None
    """The most bytes of memory, and of a file."""
    model: str | None
    agent: dict[str, JSON] | None
    """How a job starts it, where it is one."""
    timeout_s: float
    split: str
    first: int
    count: int
    task: int
    turns: list[excerpts.TurnScript] | None
    seed: int


class Teller(ExaminationWatcher):
    """Writes lines of JSON: ``{"check": ...}``, or ``{"act": ..., "seconds": ...}``."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def found(self, check: Check) -> None:
        self._tell({"check": check.to_json()})

    def still(self, act: str, seconds: float) -> None:
        self._tell({"act": act, "seconds": seconds})

    def _tell(self, line: Told) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader is gone
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class Told(TypedDict, total=False):
    check: CheckRecord
    act: str
    seconds: float


class Result(TypedDict):
    result: JSON | excerpts.TaskExcerpt | excerpts.PlayedExcerpt | Starts


class ErrorResult(TypedDict):
    error: str


def main() -> None:
    order = _order(sys.argv[1])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if (networks := order.get("networks")) is not None:
        guard_connections(parse_networks(networks))
    if (bounds := order.get("bounds")) is not None:
        _bound(*bounds)
    answer = _validated(order) if order.get("do", "validate") == "validate" else _excerpt(order)
    with os.fdopen(order["descriptor"], "w", encoding="utf-8") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever still hangs ends with it


def _order(text: str) -> ExaminationOrder:
    if text.isdecimal():
        with os.fdopen(int(text), "r", encoding="utf-8") as file:
            text = file.read()
    order: ExaminationOrder = json.loads(text)
    return order


def _bound(memory_bytes: int, file_bytes: int) -> None:
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _validated(order: ExaminationOrder) -> JudgedRecord:
    model = Path(order["model"]) if order["model"] else None
    timeout_s, agent, telling = order["timeout_s"], order.get("agent"), order.get("telling")
    witness = None if telling is None else Teller(telling)
    return validate(
        order["ref"], order["config"], model=model, timeout_s=timeout_s, agent=agent, witness=witness
    ).to_json()


def _loaded(order: ExaminationOrder) -> Environment:
    agent = order.get("agent")
    if agent is None:
        return load_environment(order["ref"], order["config"])
    if order["do"] == "play":
        raise InvalidEnvironment(
            "an agent plays it, which asks a policy for its turns: the first step of a job tries it"
        )
    return load_environment(order["ref"], order["config"], agent=AgentStart.from_json(agent))


def _excerpt(order: ExaminationOrder) -> Result | ErrorResult:
    """``{"result": ...}``, or ``{"error": text}`` about the environment or the question."""
    try:
        environment = _loaded(order)
        match order["do"]:
            case "schema":
                return {"result": excerpts.schema(environment)}
            case "tasks":
                found = excerpts.tasks(environment, Split(order["split"]), order["first"], order["count"])
                return {"result": asyncio.run(found)}
            case "prompts":
                timeouts = timeouts_of(environment, order["timeout_s"])
                return {"result": asyncio.run(excerpts.starts(environment, timeouts, NUM_PROMPTS))}
            case _:
                timeouts = timeouts_of(environment, order["timeout_s"])
                given = (Split(order["split"]), order["task"], order["turns"], order["seed"])
                return {"result": asyncio.run(excerpts.play(environment, timeouts, *given))}
    except UnreachableEnvironment as error:
        return {"error": str(error)}
    except InvalidEnvironment as error:
        return {"error": f"{NOT_LOADED}{error}" if order["do"] in ("prompts", "schema") else str(error)}
    except (EnvironmentFailed, LookupError) as error:
        return {"error": str(error)}
    except Exception as error:  # the author's code
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
