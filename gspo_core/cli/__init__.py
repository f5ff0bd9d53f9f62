"""The ``gspo`` command: thin, and quick to start, since each command imports what it needs only when it runs.

Commands that belong to the service (``up``, ``launch``, ``env serve``) are registered by it: ``gspo_core.cli.service``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from gspo_core.cli.command import CommandError, CommandParser

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except CommandError as error:
        from gspo_core.cli.terminal import plain

        print(f"gspo: {plain(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output went away (`gspo jobs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> CommandParser:
    from gspo_core.cli.env_options import add_env
    from gspo_core.cli.service import add_service_commands

    parser = CommandParser(prog="gspo", description="Train language-model agents by reinforcement learning.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_service_commands(commands)
    _add_submit(commands)
    _add_watch(commands)
    _add_jobs(commands)
    _add_control(commands)
    _add_episodes(commands)
    add_env(commands, _add_server)
    _add_workers(commands)
    doctor = commands.add_parser("doctor", help="check what is missing or wrong on this machine")
    _add_server(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("GSPO_URL", DEFAULT_URL),
        help=f"address of the API (default: $GSPO_URL or {DEFAULT_URL})",
    )


def _add_submit(commands: argparse._SubParsersAction[CommandParser]) -> None:
    submit = commands.add_parser("submit", help="submit a job from a JSON, YAML or TOML file")
    submit.add_argument("file")
    submit.add_argument("--dry-run", action="store_true", help="check the file against the server; create nothing")
    submit.add_argument("--watch", action="store_true", help="follow the job once it is accepted")
    submit.add_argument("--key", help="submitting again with the same key returns the same job (Idempotency-Key)")
    _add_server(submit)
    submit.set_defaults(run=_submit)


def _add_watch(commands: argparse._SubParsersAction[CommandParser]) -> None:
    watch = commands.add_parser("watch", help="follow a job live")
    watch.add_argument("job")
    watch.add_argument("--json", action="store_true", help="one JSON object per event instead of a display")
    _add_server(watch)
    watch.set_defaults(run=_watch)


def _add_jobs(commands: argparse._SubParsersAction[CommandParser]) -> None:
    jobs = commands.add_parser("jobs", help="list the jobs, newest first")
    jobs.add_argument("--json", action="store_true", help="one JSON object per job")
    _add_server(jobs)
    jobs.set_defaults(run=_jobs)


def _add_control(commands: argparse._SubParsersAction[CommandParser]) -> None:
    what = {"pause": "pause a job after its current step", "resume": "resume a paused job", "cancel": "cancel a job"}
    for name, text in what.items():
        control = commands.add_parser(name, help=text)
        control.add_argument("job")
        if name == "cancel":
            control.add_argument("--drain", action="store_true", help="train the work in progress first")
            control.add_argument("--checkpoint", action="store_true", help="write a checkpoint at the end")
        _add_server(control)
        control.set_defaults(run=_control, verb=name)
    change = commands.add_parser("set", help="change settings of a running job, from its next step on")
    change.add_argument("job")
    change.add_argument("assignments", nargs="+", metavar="KEY=VALUE", help="for example optimizer.lr=5e-7")
    _add_server(change)
    change.set_defaults(run=_set)


def _add_workers(commands: argparse._SubParsersAction[CommandParser]) -> None:
    workers = commands.add_parser("workers", help="list trainers, rollout workers and engines")
    workers.set_defaults(run=_workers)
    drain = commands.add_parser("drain", help="ask a trainer or rollout worker to leave, or drain an engine")
    drain.add_argument("process", help="its id, as shown by `gspo workers`; for an engine, its address")
    drain.add_argument("--undo", action="store_true", help="use an engine again")
    drain.set_defaults(run=_drain)
    for action in (workers, drain):
        action.add_argument("--json", action="store_true", help="print the answer as JSON")
        _add_server(action)


def _add_episodes(commands: argparse._SubParsersAction[CommandParser]) -> None:
    episodes = commands.add_parser("episodes", help="list the trained episodes of a job, or read one")
    episodes.add_argument("which", metavar="JOB | JOB/GROUP/MEMBER")
    episodes.add_argument("--step", type=int, help="only episodes of this step")
    episodes.add_argument("--max-reward", type=float, help="only episodes with at most this reward")
    episodes.add_argument("--limit", type=int, default=20, help="number of episodes to list (default: 20)")
    episodes.add_argument("--json", action="store_true", help="one JSON object per episode")
    _add_server(episodes)
    episodes.set_defaults(run=_episodes)


def _no_command(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        if arguments.version:
            from gspo_core import __version__

            print(__version__)
            return 0
        parser.print_help()
        return 2

    return run


def _submit(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.submit(
        arguments.url, arguments.file, dry_run=arguments.dry_run, watch=arguments.watch, key=arguments.key
    )


def _watch(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.watch import watch

    return watch(arguments.url, arguments.job, as_json=arguments.json)


def _jobs(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.show(arguments.url, as_json=arguments.json)


def _episodes(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.episodes import show

    return show(
        arguments.url,
        arguments.which,
        limit=arguments.limit,
        step=arguments.step,
        max_reward=arguments.max_reward,
        as_json=arguments.json,
    )


def _control(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    manner = {name: getattr(arguments, name) for name in ("drain", "checkpoint") if hasattr(arguments, name)}
    return jobs.control(arguments.url, arguments.job, arguments.verb, **manner)


def _set(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.change(arguments.url, arguments.job, arguments.assignments)


def _workers(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import workers

    return workers.show(arguments.url, as_json=arguments.json)


def _drain(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import workers

    return workers.drain(arguments.url, arguments.process, undo=arguments.undo, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.doctor import doctor

    return doctor(arguments.url)
