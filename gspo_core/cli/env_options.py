"""The actions of ``gspo env`` and their options; what each does is in ``project``, ``env`` (both here) and
``registered`` (the service).
``serve`` comes with the service.

A reference with a colon (``package.module:Class``, ``file.py:Class``) is code on this machine; a name, or
``name@version``, is a registered environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from gspo_core.cli.command import CommandError, CommandParser

Actions: TypeAlias = "argparse._SubParsersAction[CommandParser]"
AddServer = Callable[[argparse.ArgumentParser], None]
LOCAL_REF = "package.module:Class or path/to/file.py:Class"


def add_env(commands: Actions, add_server: AddServer) -> None:
    from gspo_core.cli.service import add_service_commands

    env = commands.add_parser("env", help="examine, try out and register environments")
    actions = env.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_init(actions)
    _add_local(actions, add_server)
    _add_add(actions, add_server)
    _add_registered(actions, add_server)
    add_service_commands(actions, "env")


def _add_local(actions: Actions, add_server: AddServer) -> None:
    validate = actions.add_parser("validate", help="examine an environment before it trains anything")
    validate.add_argument("ref", help=f"{LOCAL_REF}; or a registered NAME, which a rollout worker examines")
    validate.add_argument("--json", action="store_true", help="print the report as JSON")
    validate.add_argument("--model", help="a model directory, for the length of the prompts in tokens")
    validate.add_argument("--timeout", type=float, default=5.0, help="seconds allowed per call (default: 5)")
    validate.add_argument("--agent", metavar="JSON", help='how its agent is started: {"command": ["python", "a.py"]}')
    add_server(validate)
    validate.set_defaults(run=_validate)
    play = actions.add_parser("play", help="play an episode in the terminal, as the policy")
    play.add_argument("ref", help=LOCAL_REF)
    _add_task(play)
    play.set_defaults(run=_play)
    for action in (validate, play):
        action.add_argument("--config", metavar="JSON", help="keyword arguments of the class")


def _add_init(actions: Actions) -> None:
    init = actions.add_parser(
        "init",
        help="make a project: an environment or an agent, its tests, a job and a page",
        description="Make a folder that works at once: an environment, its tests, job.yaml and README.md.",
    )
    init.add_argument("name", help="of the module and the folder: lower-case letters, digits, _ and -")
    init.add_argument("--agent", action="store_true", help="an agent that owns its loop, instead of an environment")
    init.add_argument("--folder", metavar="DIR", help="where (default: a folder of that name, here)")
    init.set_defaults(run=_init)


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", type=int, default=0, help="number of the task (default: 0)")
    parser.add_argument("--split", choices=["train", "eval"], default="train")
    parser.add_argument("--seed", type=int, default=0)


def _add_add(actions: Actions, add_server: AddServer) -> None:
    add = actions.add_parser(
        "add",
        help="register an environment under a name",
        description="Register an environment: the same content under the same name is the same version.",
    )
    add.add_argument("name", help="lower-case letters, digits, _ and -")
    add.add_argument(
        "ref",
        nargs="?",
        help="package.module:Class, installed with the workers; or path/to/file.py:Class, which is uploaded",
    )
    add.add_argument("--folder", metavar="DIR", help="upload this folder; REF is a class in it")
    add.add_argument("--openenv", metavar="ADDRESS", help="an OpenEnv server, wss://HOST/ws")
    add.add_argument("--gym", metavar="ID", help="a Gymnasium environment")
    add.add_argument("--reasoning-gym", metavar="DATASET", help="a reasoning-gym data set")
    add.add_argument("--mcp", metavar="ADDRESS", help="an MCP server; with --reward and --tasks")
    add.add_argument("--reward", metavar="REF", help="for --mcp: package.module:function, installed with the workers")
    add.add_argument("--tasks", metavar="FILE", help="for --mcp: one JSON object per line, each with a prompt")
    add.add_argument("--config", metavar="JSON", help="further keyword arguments of the class or adapter")
    add.add_argument("--agent", metavar="JSON", help="how the agent that plays it is started, as a job has it")
    _ask(add, add_server, _call("add"))


def _add_registered(actions: Actions, add_server: AddServer) -> None:
    listing = actions.add_parser("list", help="registered environments")
    listing.add_argument("name", nargs="?", help="only the versions of this name")
    _ask(listing, add_server, _call("listing"))
    show = actions.add_parser("show", help="show one registered environment: its source and what was found")
    show.add_argument("--schema", action="store_true", help="also its tools and limits, from a rollout worker")
    trial = actions.add_parser("try", help="have a rollout worker play one episode of a registered environment")
    trial.add_argument(
        "--turns", metavar="JSON", help='turns of the policy: [{"text": "42"}] (default: from its oracle)'
    )
    _add_task(trial)
    remove = actions.add_parser("remove", help="remove a version that no open job uses")
    for action, name in ((show, "show"), (trial, "trial"), (remove, "remove")):
        action.add_argument("ref", metavar="NAME[@VERSION]")
        _ask(action, add_server, _call(name))


def _ask(parser: argparse.ArgumentParser, add_server: AddServer, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_server(parser)
    parser.set_defaults(run=run)


def _call(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        from gspo_core.cli import registered

        status: int = getattr(registered, name)(arguments)
        return status

    return run


def _validate(arguments: argparse.Namespace) -> int:
    file = Path(arguments.ref if arguments.ref.endswith(".py") else f"{arguments.ref}.py")
    if arguments.ref.endswith(".py") or (":" not in arguments.ref and file.is_file()):
        what = " or ".join(f"{file}:{name}" for name in _meant(file)[:3] or ["MyClass"])
        raise CommandError(f"{file} is a file; name a class in it, or an agent's function, as in {what}")
    if ":" not in arguments.ref:
        return _call("validate")(arguments)
    from gspo_core.cli import env

    return env.validate(arguments)


def _meant(file: Path) -> list[str]:
    """What may be, where the file can be read: its classes, and the function that the pages give an agent."""
    import ast

    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) or (isinstance(node, functions) and node.name == "run")
    ]


def _init(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import project

    return project.init(arguments)


def _play(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import env

    return env.play(arguments)
