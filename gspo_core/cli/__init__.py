"""The ``gspo`` command: thin, and quick to start, since each command imports what it needs only when it runs.

``up`` and ``doctor`` reach into the services when those are there; a bare wheel (no services) says so clearly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

DEFAULT_URL = "http://127.0.0.1:8000"


class CommandError(Exception):
    """Ends the command with status 1; the message is for a person."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except CommandError as error:
        print(f"gspo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output went away (`gspo jobs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gspo", description="Train language-model agents by reinforcement learning.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_up(commands)
    _add_submit(commands)
    _add_watch(commands)
    _add_jobs(commands)
    _add_control(commands)
    _add_episodes(commands)
    _add_env(commands)
    _add_launch(commands)
    doctor = commands.add_parser("doctor", help="look for what is missing or wrong on this machine")
    _add_server(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("GSPO_URL", DEFAULT_URL),
        help=f"address of the API (default: $GSPO_URL or {DEFAULT_URL})",
    )


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="run the whole stack on this machine until Ctrl-C")
    up.add_argument("--data-dir", help="where everything is kept (default: $GSPO_DATA_DIR or .gspo)")
    up.add_argument("--model", help="model that the engine starts with (default: the demo model, made when missing)")
    up.add_argument("--port", type=int, default=8000, help="of the API; 0 takes a free one (default: 8000)")
    up.add_argument("--rollout-workers", type=int, default=1, help="number of rollout processes (default: 1)")
    up.set_defaults(run=_up)


def _add_submit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = commands.add_parser("submit", help="submit a job from a JSON, YAML or TOML file")
    submit.add_argument("file")
    submit.add_argument("--dry-run", action="store_true", help="check the file against the server; create nothing")
    submit.add_argument("--watch", action="store_true", help="follow the job after it was accepted")
    _add_server(submit)
    submit.set_defaults(run=_submit)


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    watch = commands.add_parser("watch", help="follow a job live")
    watch.add_argument("job")
    watch.add_argument("--json", action="store_true", help="one JSON object per event instead of a display")
    _add_server(watch)
    watch.set_defaults(run=_watch)


def _add_jobs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    jobs = commands.add_parser("jobs", help="list the jobs, newest first")
    jobs.add_argument("--json", action="store_true", help="one JSON object per job")
    _add_server(jobs)
    jobs.set_defaults(run=_jobs)


def _add_control(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = {"pause": "pause a job after its present step", "resume": "let a paused job go on", "cancel": "cancel a job"}
    for name, text in what.items():
        control = commands.add_parser(name, help=text)
        control.add_argument("job")
        if name == "cancel":
            control.add_argument("--drain", action="store_true", help="train what is under way first")
            control.add_argument("--checkpoint", action="store_true", help="write a checkpoint at the end")
        _add_server(control)
        control.set_defaults(run=_control, verb=name)
    change = commands.add_parser("set", help="change settings of a job that runs, from its next step on")
    change.add_argument("job")
    change.add_argument("assignments", nargs="+", metavar="KEY=VALUE", help="for instance optimizer.lr=5e-7")
    _add_server(change)
    change.set_defaults(run=_set)


def _add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    env = commands.add_parser("env", help="environments: examine one, try one by hand")
    actions = env.add_subparsers(title="actions", metavar="ACTION", required=True)
    validate = actions.add_parser("validate", help="examine an environment before it trains anything")
    validate.add_argument("--json", action="store_true", help="the report as JSON")
    validate.add_argument("--model", help="a model directory, to know how long the prompts are in tokens")
    validate.add_argument("--timeout", type=float, default=5.0, help="seconds for each call (default: 5)")
    validate.set_defaults(run=_env_validate)
    play = actions.add_parser("play", help="be the policy: play an episode on the terminal")
    play.add_argument("--task", type=int, default=0, help="number of the task (default: 0)")
    play.add_argument("--split", choices=["train", "eval"], default="train")
    play.add_argument("--seed", type=int, default=0)
    play.set_defaults(run=_env_play)
    serve = actions.add_parser("serve", help="serve an environment over OpenEnv's protocol")
    serve.add_argument("ref", help="package.module:Class or path/to/file.py:Class")
    serve.add_argument("--config", default="{}", help="keyword arguments of the class, as JSON")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    serve.add_argument("--port", default="8000", help="port to bind (default: %(default)s)")
    serve.add_argument("--capacity", default="16", help="episodes at once (default: %(default)s)")
    serve.set_defaults(run=_env_serve)
    for action in (validate, play):
        action.add_argument("ref", help="package.module:Class or path/to/file.py:Class")
        action.add_argument("--config", metavar="JSON", help="keyword arguments of the class")


def _add_episodes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    episodes = commands.add_parser("episodes", help="list the trained episodes of a job, or read one")
    episodes.add_argument("which", metavar="JOB | JOB/GROUP/MEMBER")
    episodes.add_argument("--step", type=int, help="only of this step")
    episodes.add_argument("--max-reward", type=float, help="only those with at most this reward")
    episodes.add_argument("--limit", type=int, default=20, help="how many (default: 20)")
    episodes.add_argument("--json", action="store_true", help="one JSON object per episode")
    _add_server(episodes)
    episodes.set_defaults(run=_episodes)


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    launch = commands.add_parser("launch", help="run the whole stack elsewhere")
    places = launch.add_subparsers(title="places", metavar="PLACE", required=True)
    slurm = places.add_parser("slurm", help="write a batch script that runs the stack over an allocation")
    slurm.add_argument("--project", default=".", help="checkout of the project, with its .venv (default: here)")
    slurm.add_argument("--data-dir", required=True, help="directory that all nodes share")
    slurm.add_argument("--model", required=True, help="model that the engines start with, on every node")
    slurm.add_argument("--engine", help="command of an engine, with {model} and {port} (default: the embedded one)")
    slurm.add_argument("--job", metavar="FILE", help="submit this job; when it ends, the allocation does")
    slurm.add_argument("--nodes", type=int, default=1)
    slurm.add_argument("--time", default="24:00:00")
    slurm.add_argument("--partition")
    slurm.add_argument("--gpus-per-node", type=int, default=0)
    slurm.add_argument("--rollout-workers", type=int, default=1, help="on each node (default: 1)")
    slurm.add_argument("--trainer-nodes", type=int, default=1, help="that train together (default: the first)")
    slurm.add_argument("--trainer-ranks", type=int, default=1, help="of the trainer, on each of its nodes (default: 1)")
    slurm.add_argument("--output", metavar="FILE", help="where to write it (default: the terminal)")
    slurm.set_defaults(run=_launch_slurm)


def _no_command(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        if arguments.version:
            from gspo_core import __version__

            print(__version__)
            return 0
        parser.print_help()
        return 2

    return run


def _up(arguments: argparse.Namespace) -> int:
    try:
        from services.local.up import up
    except ModuleNotFoundError as error:
        raise CommandError(
            f"`gspo up` runs the services, and {error.name} is not installed here. Use a checkout of the project: "
            f"`make up` there installs what it needs and starts the stack."
        ) from error
    status: int = up(
        data_dir=arguments.data_dir,
        model=arguments.model,
        port=arguments.port,
        rollout_workers=arguments.rollout_workers,
    )
    return status


def _launch_slurm(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.launch import EMBEDDED, Allocation, slurm_script, write

    if not 1 <= arguments.trainer_nodes <= arguments.nodes or arguments.trainer_ranks < 1:
        raise CommandError(
            f"a trainer is one rank or more on one node or more of the {arguments.nodes} of the allocation; "
            f"not --trainer-nodes {arguments.trainer_nodes} --trainer-ranks {arguments.trainer_ranks}"
        )
    allocation = Allocation(
        nodes=arguments.nodes,
        time=arguments.time,
        partition=arguments.partition,
        gpus_per_node=arguments.gpus_per_node,
        rollout_workers=arguments.rollout_workers,
        trainer_nodes=arguments.trainer_nodes,
        trainer_ranks=arguments.trainer_ranks,
    )
    script = slurm_script(
        allocation,
        project=os.path.abspath(arguments.project),
        data_dir=os.path.abspath(arguments.data_dir),
        model=arguments.model,
        engine=arguments.engine or EMBEDDED,
        job=os.path.abspath(arguments.job) if arguments.job else None,
    )
    return write(script, arguments.output)


def _submit(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.submit(arguments.url, arguments.file, dry_run=arguments.dry_run, watch=arguments.watch)


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


def _env_validate(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import env

    return env.validate(arguments)


def _env_serve(arguments: argparse.Namespace) -> int:
    try:
        from services.openenv_server import main as serve
    except ImportError as error:
        raise CommandError(f"serving needs the services, which are not installed: {error}") from error
    if "" not in sys.path:  # modules beside the caller can be named
        sys.path.insert(0, "")
    names = ("config", "host", "port", "capacity")
    options = [text for name in names for text in (f"--{name}", getattr(arguments, name))]
    return serve([arguments.ref, *options])


def _env_play(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import env

    return env.play(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.doctor import doctor

    return doctor(arguments.url)
