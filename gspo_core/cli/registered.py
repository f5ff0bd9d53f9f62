"""``gspo env add``, ``list``, ``show``, ``try``, ``remove``, ``validate`` of a name: environments of the service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from gspo_core import strict_json
from gspo_core.api_answers import EnvironmentSource, RegisteredEnvironment, TrialEntry
from gspo_core.cli.command import CommandError
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say
from gspo_core.client import Client
from gspo_core.json_value import JSON


def add(arguments: argparse.Namespace) -> int:
    config = _json_object(arguments.config, "--config") if arguments.config else {}
    kinds = [kind for kind in ("folder", "openenv", "gym", "reasoning_gym", "mcp") if getattr(arguments, kind)]
    if len(kinds) > 1 or (arguments.ref is not None) != (kinds in ([], ["folder"])):
        raise CommandError(
            "name one source: REF, --folder DIR with a REF in it, --openenv, --gym, --reasoning-gym or --mcp"
        )
    agent = None if arguments.agent is None else _json_object(arguments.agent, "--agent")
    with connected(arguments.url) as client:
        found = _upload(client, arguments, config, agent) or client.register_environment(
            arguments.name, _source(arguments, kinds, config), agent=agent
        )
    say(*([json.dumps(found)] if arguments.json else _lines(found)))
    return 0


def _upload(
    client: Client, arguments: argparse.Namespace, config: Mapping[str, JSON], agent: Mapping[str, JSON] | None
) -> RegisteredEnvironment | None:
    """None: it was not uploaded."""
    from gspo_core.packed_folder import FolderRefused

    ref = arguments.ref or ""
    path = Path(ref.rpartition(":")[0])
    if not arguments.folder and path.suffix != ".py":
        return None
    if config:
        raise CommandError("--config: an upload carries its own defaults; write them there")
    try:
        if arguments.folder:
            return client.upload_folder(arguments.name, ref, arguments.folder, agent=agent)
        inner = f"{path.name}:{ref.rpartition(':')[2]}"
        return client.upload_environment(arguments.name, inner, path.read_bytes(), kind="text/x-python", agent=agent)
    except (FolderRefused, OSError) as error:
        raise CommandError(str(error)) from error


def _source(arguments: argparse.Namespace, kinds: list[str], config: dict[str, JSON]) -> EnvironmentSource:
    source: EnvironmentSource
    match kinds:
        case ["openenv"]:
            source = {"type": "openenv", "url": arguments.openenv}
        case ["gym"]:
            source = {"type": "gym", "id": arguments.gym}
        case ["reasoning_gym"]:
            source = {"type": "reasoning_gym", "dataset": arguments.reasoning_gym}
        case ["mcp"]:
            if not (arguments.reward and arguments.tasks):
                raise CommandError("--mcp needs --reward REF and --tasks FILE")
            source = {"type": "mcp", "url": arguments.mcp, "reward": arguments.reward}
            source["tasks"] = _tasks(arguments.tasks)
        case _:
            source = {"type": "reference", "ref": arguments.ref}
    if config:
        source["config"] = config
    return source


def _tasks(file: str) -> list[dict[str, JSON]]:
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise CommandError(str(error)) from error
    return [_json_object(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _json_object(text: str, what: str) -> dict[str, JSON]:
    value = _json(text, what)
    if not isinstance(value, dict):
        raise CommandError(f"{what} must be a JSON object")
    return value


def _json(text: str, what: str) -> JSON:
    try:
        return strict_json.parse(text)
    except strict_json.TextRejected as error:
        raise CommandError(f"{what} is not JSON: {error}") from error


def listing(arguments: argparse.Namespace) -> int:
    with connected(arguments.url) as client:
        found = list(client.environments(name=arguments.name))
    for one in found:
        say(*([json.dumps(one)] if arguments.json else _lines(one)))
    if not found and not arguments.json:
        print("no environments yet; register one with: gspo env add NAME REF")
    return 0


def _lines(one: RegisteredEnvironment) -> Iterator[str]:
    source = one["source"]
    where = source.get("ref") or source.get("url") or source.get("id") or source.get("dataset")
    yield f"{one['id']:<24} {one['status']:<10} {source['type']} {where}"
    for failure in one["failures"]:
        yield f"    {failure}"


def show(arguments: argparse.Namespace) -> int:
    with connected(arguments.url) as client:
        found = client.environment(arguments.ref)
        described = client.environment_schema(arguments.ref) if arguments.schema else None
    if arguments.json:
        print(json.dumps({**found, "schema": described} if described else found))
        return 0
    say(*_lines(found))
    print(f"    registered {found['created_at'][:16]}Z".replace("T", " ") + f", content {found['digest'][:12]}")
    if found["agent"] is not None:
        say(f"    played by an agent: {json.dumps(found['agent'], ensure_ascii=False)}")
    config = found["source"].get("config")
    if config:
        say(f"    config {json.dumps(config, ensure_ascii=False)}")
    for tool in described["tools"] if described else ():
        function = tool["function"]
        parameters = function.get("parameters", {}).get("properties", {})
        signature = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in parameters.items())
        say(f"    {function['name']}({signature})  {function.get('description', '')}")
    if described and (counts := described["num_tasks"]):
        say("    tasks: " + ", ".join(f"{count} {split}" for split, count in counts.items()))
    return 0


def validate(arguments: argparse.Namespace) -> int:
    from gspo_core.testing import EnvironmentReport

    with connected(arguments.url) as client:
        found = client.validate_environment(arguments.ref)
    report = EnvironmentReport.from_json({"name": found["environment"], "checks": found["checks"]})
    say(json.dumps(found, indent=2) if arguments.json else str(report))
    return 0 if report.ok else 1


def trial(arguments: argparse.Namespace) -> int:
    turns = None if arguments.turns is None else _turns(arguments.turns)
    with connected(arguments.url) as client:
        played = client.try_environment(
            arguments.ref, turns, task=arguments.task, split=arguments.split, seed=arguments.seed
        )
    if arguments.json:
        print(json.dumps(played))
        return 0
    for entry in played["transcript"]:
        say(*_said(entry))
    parts = "".join(f"  {name} {value:g}" for name, value in played["reward_parts"].items())
    say(f"ended: {played['stop_reason']}, reward {played['reward']:g}{parts}")
    return 0


def _turns(text: str) -> list[dict[str, JSON]]:
    given = _json(text, "--turns")
    turns = [turn for turn in given if isinstance(turn, dict)] if isinstance(given, list) else []
    if turns != given:
        raise CommandError('--turns must be a JSON list: [{"text": "42"}]')
    return turns


def _said(entry: TrialEntry) -> Iterator[str]:
    if entry.get("text"):
        yield f"{entry['from']}: {entry['text']}"
    for call in entry.get("calls", ()):
        yield f"{entry['from']} calls {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"
    if message := entry.get("message"):
        yield f"{entry['from']}: {message['content']}"


def remove(arguments: argparse.Namespace) -> int:
    if "@" not in arguments.ref:
        raise CommandError(f"name the version: {arguments.ref}@1 (gspo env list {arguments.ref})")
    with connected(arguments.url) as client:
        client.remove_environment(arguments.ref)
    print(json.dumps({"removed": arguments.ref}) if arguments.json else f"{arguments.ref} is removed")
    return 0
