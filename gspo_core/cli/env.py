"""``gspo env validate`` and ``gspo env play``: an environment examined, and tried by hand, before it trains."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from gspo_core import strict_json
from gspo_core.cli.command import CommandError
from gspo_core.cli.examination import examine
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from gspo_core.env import Environment, Observation, ParsedTurn, Session
    from gspo_core.messages import Message, ToolSchema
    from gspo_core.testing import Check

PLAY_HELP = """Write a call (add amount=3), JSON ({"name": "add", "arguments": {"amount": 3}}), or text for a turn
without a call. :tools shows the tools, an empty line or :end ends the episode."""


def validate(arguments: argparse.Namespace) -> int:
    order: dict[str, JSON] = {"ref": arguments.ref, "config": config_of(arguments.config)}
    order |= {"agent": None if arguments.agent is None else _agent_of(arguments.agent)}
    order |= {"model": arguments.model, "timeout_s": arguments.timeout}
    report = examine(order, _say_nothing if arguments.json else _say_found, _say_still)
    print(json.dumps(report.to_json(), indent=2, ensure_ascii=False) if arguments.json else f"\n{report.verdict}")
    return 0 if report.ok else 1


def _say_found(check: Check) -> None:
    print(check, flush=True)


def _say_nothing(_: Check) -> None: ...


def _say_still(act: str, seconds: float) -> None:
    print(f"  ... {act}, for {seconds:.0f} s so far", file=sys.stderr, flush=True)


def play(arguments: argparse.Namespace) -> int:
    from gspo_core.env import EnvironmentFailed, InvalidEnvironment, load_environment

    try:
        with CallersPath():
            environment = load_environment(arguments.ref, config_of(arguments.config))
        return asyncio.run(_play(environment, arguments))
    except InvalidEnvironment as error:
        raise CommandError(str(error)) from error
    except EnvironmentFailed as failure:
        raise CommandError(f"the environment failed in {failure.phase}: {failure.reason}") from failure


class CallersPath:
    """Modules beside the caller can be named, as `python -m` allows it."""

    def __enter__(self) -> None:
        sys.path.insert(0, "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.path.remove("")


def config_of(text: str | None) -> dict[str, JSON]:
    return {} if text is None else json_object(text, "--config", "the keyword arguments of the class")


def json_object(text: str, option: str, what: str) -> dict[str, JSON]:
    try:
        value = strict_json.parse(text)
    except strict_json.TextRejected as error:
        raise CommandError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object, {what}")
    return value


def _agent_of(text: str) -> dict[str, JSON]:
    """Refused where a job that says it would be."""
    from pydantic import ValidationError

    from gspo_core.problems import problems
    from gspo_core.spec import AgentSpec

    given = json_object(text, "--agent", "as a job has it")
    try:
        AgentSpec.model_validate(given)
    except ValidationError as error:
        found = "; ".join(one.message for one in problems(error, AgentSpec, given))
        raise CommandError(f"--agent: {found}") from None
    return given


async def _play(environment: Environment, arguments: argparse.Namespace) -> int:
    from gspo_core.testing.watch import timeouts_of
    from gspo_core.types import Split

    task = await environment.task(Split(arguments.split), arguments.task)
    session = environment.session(limits=timeouts_of(environment), episode_id="play")
    try:
        start = await session.start(task, arguments.seed)
        print(PLAY_HELP, end="\n\n")
        _show(start.messages)
        _show_tools(start.tools)
        paid = await _take_turns(session, start.tools)
        reward, parts = await session.score()
        reward += paid
        print(f"reward {reward:g}" + "".join(f"  {name} {value:g}" for name, value in parts.items()))
    finally:
        await session.close()
    return 0


async def _take_turns(session: Session, tools: Sequence[ToolSchema]) -> float:
    """Plays the turns, and returns the sum of their rewards."""
    paid = 0.0
    while True:
        print("> ", end="", flush=True)
        line = (await asyncio.to_thread(sys.stdin.readline)).strip()
        if line in ("", ":end"):
            print()
            return paid
        if line == ":tools":
            _show_tools(tools)
            continue
        observation: Observation = await session.act(read_turn(line, tools))
        _show(observation.messages)
        if observation.reward is not None:
            paid += observation.reward
            print(f"this turn was paid {observation.reward:g}")
        if observation.done:
            print(f"ended: {observation.stop_reason}")
            return paid


def read_turn(line: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """A typed line as a turn of the policy."""
    from gspo_core.env import CallStatus, ParsedTurn, ToolCall

    name, _, rest = line.partition(" ")
    if line.startswith("{"):
        try:
            given = json.loads(line)
        except ValueError:
            return ParsedTurn("", (ToolCall(None, {}, CallStatus.INVALID_JSON, line, 0, 1),))
        call = ToolCall(given.get("name"), given.get("arguments", {}), CallStatus.OK, line, 0, 1)
        return ParsedTurn("", (call,))
    keys = [word.partition("=") for word in _words(rest)]
    is_call = bool(keys) and name.isidentifier() and all(key.isidentifier() and equals for key, equals, _ in keys)
    if not is_call and name not in {tool["function"]["name"] for tool in tools}:
        return ParsedTurn(line)
    return ParsedTurn("", (ToolCall(name, _arguments(rest), CallStatus.OK, line, 0, 1),))


def _words(text: str) -> list[str]:
    """At spaces, but for those within double quotes."""
    return re.findall(r'(?:"(?:\\.|[^"\\])*"|\S)+', text)


def _arguments(text: str) -> dict[str, JSON]:
    """``amount=3 text="two words"``; a value that is no JSON is text."""
    found: dict[str, JSON] = {}
    for word in _words(text):
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _show(messages: Sequence[Message]) -> None:
    for message in messages:
        print(f"[{message['role']}] {message['content']}")


def _show_tools(tools: Sequence[ToolSchema]) -> None:
    for tool in tools:
        function = tool["function"]
        parameters = ", ".join(
            f"{name}: {schema.get('type', 'any')}" for name, schema in function["parameters"]["properties"].items()
        )
        print(f"  {function['name']}({parameters})  {function['description']}")
