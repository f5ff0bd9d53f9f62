"""``python -m gspo_core.testing ORDER``: what is asked of an environment, done in a process of its own.

Rule: what an environment prints is not mixed with the answer, and an environment that ends its process ends only this
one. ``ORDER`` is JSON, or the number of a descriptor that holds it; the answer is written, as JSON, to the descriptor
that it names. ``do`` says what is wanted: ``validate`` (the default), ``schema``, ``tasks`` or ``play``.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_core.env import EnvironmentFailed, InvalidEnvironment, load_environment
from gspo_core.outbound import guard_connections, parse_networks
from gspo_core.testing import excerpts
from gspo_core.testing.watch import timeouts_of, validate
from gspo_core.types import Split


def main() -> None:
    order = _order(sys.argv[1])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if order.get("networks") is not None:
        guard_connections(parse_networks(order["networks"]))
    if order.get("bounds") is not None:
        _bound(*order["bounds"])
    answer = _validated(order) if order.get("do", "validate") == "validate" else _excerpt(order)
    with os.fdopen(order["descriptor"], "w", encoding="utf-8") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nobody waits for what hangs


def _order(text: str) -> dict[str, Any]:
    if text.isdecimal():
        with os.fdopen(int(text), "r", encoding="utf-8") as file:
            text = file.read()
    order: dict[str, Any] = json.loads(text)
    return order


def _bound(memory_bytes: int, file_bytes: int) -> None:
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _validated(order: Mapping[str, Any]) -> dict[str, Any]:
    model = Path(order["model"]) if order["model"] else None
    return validate(order["ref"], order["config"], model=model, timeout_s=order["timeout_s"]).to_json()


def _excerpt(order: Mapping[str, Any]) -> dict[str, Any]:
    """``{"result": ...}``, or ``{"error": text}`` about the environment or the question."""
    try:
        environment = load_environment(order["ref"], order["config"])
        match order["do"]:
            case "schema":
                result = excerpts.schema(environment)
            case "tasks":
                found = excerpts.tasks(environment, Split(order["split"]), order["first"], order["count"])
                result = asyncio.run(found)
            case _:
                timeouts = timeouts_of(environment, order["timeout_s"])
                given = (Split(order["split"]), order["task"], order["turns"], order["seed"])
                result = asyncio.run(excerpts.play(environment, timeouts, *given))
    except (InvalidEnvironment, EnvironmentFailed, LookupError) as error:
        return {"error": str(error)}
    except Exception as error:  # the author's code
        return {"error": f"{type(error).__name__}: {error}"}
    return {"result": result}


if __name__ == "__main__":
    main()
