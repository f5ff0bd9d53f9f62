"""The ``gspo`` command: thin, and quick to start, since each command imports what it needs only when it runs.

Commands that belong to the service (``up``, ``launch``, ``env serve``) are registered by it: ``gspo_core.cli.service``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gspo_core.cli.command import CommandError, CommandParser
from gspo_core.cli.retrain_options import add_retrain
from gspo_core.cli.trees import search_trees

DEFAULT_URL = "http://127.0.0.1:8000"
NUM_EPISODES = 20
"""Listed where no number is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        search_trees()
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
    from gspo_core.cli.eval_options import add_eval
    from gspo_core.cli.service import add_service_commands
    from gspo_core.cli.upper import add_upper_commands

    parser = CommandParser(prog="gspo", description="Train language-model agents by reinforcement learning.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=_no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_service_commands(commands)
    _add_submit(commands)
    _add_plan(commands)
    _add_watch(commands)
    _add_profile(commands)
    _add_jobs(commands)
    _add_reading(commands)
    _add_control(commands)
    _add_episodes(commands)
    _add_erase(commands)
    add_upper_commands(commands)
    add_env(commands, _add_server)
    add_eval(commands, _add_server)
    _add_workers(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
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
    submit.add_argument("--json", action="store_true", help="with --dry-run: all of the answer, for programs")
    submit.add_argument("--watch", action="store_true", help="follow the job once it is accepted")
    submit.add_argument("--key", help="submitting again with the same key returns the same job (Idempotency-Key)")
    _add_server(submit)
    submit.set_defaults(run=_submit)


def _add_plan(commands: argparse._SubParsersAction[CommandParser]) -> None:
    plan = commands.add_parser("plan", help="say whether a job fits its GPUs, and under which settings; starts nothing")
    plan.add_argument("file")
    plan.add_argument("--gpus", required=True, help="such as 8xH100, or 8x96GiB for one that is not known by name")
    plan.add_argument("--json", action="store_true", help="one JSON object instead of a page")
    plan.set_defaults(run=_plan)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _add_watch(commands: argparse._SubParsersAction[CommandParser]) -> None:
    watch = commands.add_parser("watch", help="follow a job live")
    watch.add_argument("job")
    watch.add_argument("--json", action="store_true", help="one JSON object per event instead of a display")
    _add_server(watch)
    watch.set_defaults(run=_watch)


def _add_profile(commands: argparse._SubParsersAction[CommandParser]) -> None:
    profile = commands.add_parser("profile", help="say where the time of a job goes, and what to change first")
    profile.add_argument("job")
    profile.add_argument("--steps", type=_positive, default=20, help="look at its newest steps (default: %(default)s)")
    profile.add_argument("--json", action="store_true", help="one JSON object instead of a page")
    _add_server(profile)
    profile.set_defaults(run=_profile)


def _add_jobs(commands: argparse._SubParsersAction[CommandParser]) -> None:
    jobs = commands.add_parser("jobs", help="list the jobs, newest first")
    jobs.add_argument("--all", action="store_true", help="not only the newest 20")
    jobs.add_argument("--json", action="store_true", help="one JSON object per job")
    _add_server(jobs)
    jobs.set_defaults(run=_jobs)


def _add_reading(commands: argparse._SubParsersAction[CommandParser]) -> None:
    logs = commands.add_parser("logs", help="print what has happened to a job; `gspo watch` goes on")
    logs.add_argument("job")
    logs.add_argument("--json", action="store_true", help="one JSON object per event")
    logs.set_defaults(run=_logs)
    metrics = commands.add_parser("metrics", help="print a job's numbers by step")
    metrics.add_argument("job")
    metrics.add_argument("--names", help="which, separated by commas; left out: the usual ones, with --csv all")
    metrics.add_argument("--last", type=_positive, metavar="N", help="only the newest N steps")
    form = metrics.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", default="table", help="for a sheet")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="one JSON object per step")
    metrics.set_defaults(run=_metrics)
    export = commands.add_parser("export", help="write a checkpoint's weights as a plain model directory")
    export.add_argument(
        "where",
        metavar="JOB[@STEP]",
        help="a job, and a step with a checkpoint (default: its newest); or JOB/EPOCH/STEP",
    )
    export.add_argument("--to", type=Path, metavar="DIR", help="fetch it from the service into this new directory")
    export.set_defaults(run=_export)
    for action in (logs, metrics, export):
        _add_server(action)


def _add_control(commands: argparse._SubParsersAction[CommandParser]) -> None:
    what = {
        "pause": "pause a job after its current step",
        "resume": "resume a job that is paused or over",
        "cancel": "cancel a job",
    }
    for name, text in what.items():
        control = commands.add_parser(name, help=text)
        control.add_argument("job")
        if name == "cancel":
            control.add_argument("--drain", action="store_true", help="train the work in progress first")
            control.add_argument("--checkpoint", action="store_true", help="write a checkpoint at the end")
        if name == "resume":
            control.description = "Resume a paused job; or go on with one that is over, as itself."
            control.add_argument("--from", type=int, dest="from_step", metavar="STEP", help="an earlier step")
            control.add_argument("--steps", type=int, help="how many steps in all; the schedule of the rate stays")
            control.add_argument("--horizon", type=int, metavar="STEP", help="where the schedule of the rate ends now")
        _add_server(control)
        control.set_defaults(run=_control, verb=name)
    remove = commands.add_parser("rm", help="remove jobs that are over, with all that they have made")
    remove.add_argument("jobs", nargs="+", metavar="JOB")
    remove.add_argument("--yes", action="store_true", help="do not ask, where a job is not named by its whole id")
    _add_server(remove)
    remove.set_defaults(run=_remove)
    fork = commands.add_parser("fork", help="begin a new job from a step of another")
    fork.add_argument("where", metavar="JOB[@STEP]", help="a job, and a step that is kept (default: its newest)")
    fork.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with another setting")
    fork.add_argument("--same-batches", action="store_true", help="feed it what its parent was trained on, first")
    fork.add_argument("--last", type=int, metavar="STEP", help="feed it those up to this step, then let it sample")
    fork.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="WHAT",
        help="feed it those without a group (17), an episode (17/3) or a part of the reward (its name)",
    )
    fork.add_argument("--rewards", metavar="FILE", help="with these rewards there, as gspo rescore --to writes them")
    fork.add_argument("--name", help="its label (default: the parent's)")
    fork.add_argument("--dry-run", action="store_true", help="say what it takes; create nothing")
    _add_server(fork)
    fork.set_defaults(run=_fork)
    add_retrain(commands, _add_server)
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
    episodes = commands.add_parser("episodes", help="list the episodes of a job or an evaluation, or read one")
    episodes.add_argument("which", metavar="JOB | JOB/GROUP/MEMBER | DIR | DIR/TASK/SAMPLE")
    episodes.add_argument("--step", type=int, help="only episodes of this step")
    episodes.add_argument("--max-reward", type=float, help="only episodes with at most this reward")
    episodes.add_argument("--limit", type=_positive, help="number of episodes to list (default: 20)")
    episodes.add_argument("--json", action="store_true", help="one JSON object per episode")
    _add_server(episodes)
    episodes.set_defaults(run=_episodes)


def _member(text: str) -> str:
    if not re.fullmatch(r"\d+/\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"an episode is GROUP/MEMBER, such as 2/0, and not {text}")
    return text


def _add_erase(commands: argparse._SubParsersAction[CommandParser]) -> None:
    erase = commands.add_parser(
        "erase", help="erase what people said, for good: of keys that just talk, or in episodes"
    )
    erase.add_argument("job")
    which = erase.add_mutually_exclusive_group(required=True)
    which.add_argument("--user", help="all that this user said and was told, also in episodes")
    which.add_argument("--episode", metavar="GROUP/MEMBER", type=_member, help="one episode, trained or not")
    which.add_argument("--trace", help="one conversation, by its id")
    _add_server(erase)
    erase.set_defaults(run=_erase)


def _no_command(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        if arguments.version:
            return _version(arguments)
        parser.print_help()
        return 2

    return run


def _version(_: argparse.Namespace) -> int:
    from gspo_core import __version__

    print(__version__)
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.submit(
        arguments.url,
        arguments.file,
        dry_run=arguments.dry_run,
        watch=arguments.watch,
        key=arguments.key,
        as_json=arguments.json,
    )


def _plan(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.plan import plan

    return plan(arguments.file, arguments.gpus, as_json=arguments.json)


def _watch(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.watch import watch

    return watch(arguments.url, _job(arguments), as_json=arguments.json)


def _jobs(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import job_table

    return job_table.show(arguments.url, as_json=arguments.json, number=None if arguments.all else job_table.NUM_SHOWN)


def _logs(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import reading

    return reading.logs(arguments.url, _job(arguments), as_json=arguments.json)


def _metrics(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import reading

    return reading.metrics(
        arguments.url, _job(arguments), names=arguments.names, last=arguments.last, form=arguments.form
    )


def _export(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import reading

    asked = re.fullmatch(r"([^@]+?)(?:@(\d{1,15})|/(\d{1,15})/(\d{1,15}))?", arguments.where)
    if asked is None:
        raise CommandError(f"{arguments.where}: write JOB, JOB@STEP or JOB/EPOCH/STEP")
    job = _place(arguments.url, asked[1])
    step, epoch = (None if text is None else int(text) for text in (asked[2] or asked[4], asked[3]))
    return reading.export(arguments.url, job, step, arguments.to, epoch=epoch)


def _job(arguments: argparse.Namespace) -> str:
    """The id of the job that is meant."""
    return _place(arguments.url, arguments.job)


def _place(url: str, text: str, mark: str = "") -> str:
    from gspo_core.cli.naming import job_meant, place_meant

    return place_meant(url, text, mark) if mark else job_meant(url, text)


def _erase(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.traffic import erase

    return erase(arguments.url, _job(arguments), user=arguments.user, trace=arguments.trace, episode=arguments.episode)


def _episodes(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.episodes import show
    from gspo_core.cli.kept_episodes import evaluation_of, show_kept

    kept = evaluation_of(arguments.which)
    is_one = kept[1] is not None if kept else "/" in arguments.which
    for option in ("--step", "--max-reward", "--limit") if is_one else ("--step",) if kept else ():
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            what = "one episode" if is_one else "an evaluation"
            raise CommandError(f"{option} chooses among the episodes of a job, and {arguments.which} is {what}")
    limit = NUM_EPISODES if arguments.limit is None else arguments.limit
    if kept is not None:
        return show_kept(*kept, limit=limit, max_reward=arguments.max_reward, as_json=arguments.json)
    return show(
        arguments.url,
        _place(arguments.url, arguments.which, "/"),
        limit=limit,
        step=arguments.step,
        max_reward=arguments.max_reward,
        as_json=arguments.json,
    )


def _control(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    names = ("drain", "checkpoint", "from_step", "steps", "horizon")
    manner = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return jobs.control(arguments.url, _job(arguments), arguments.verb, **manner)


def _remove(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.remove(arguments.url, arguments.jobs, is_sure=arguments.yes)


def _fork(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.fork(
        arguments.url,
        arguments.where,
        arguments.set,
        same_batches=arguments.same_batches,
        last=arguments.last,
        without=arguments.without,
        rewards=arguments.rewards,
        name=arguments.name,
        dry_run=arguments.dry_run,
    )


def _set(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.change(arguments.url, _job(arguments), arguments.assignments)


def _profile(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import profile

    return profile.show(arguments.url, _job(arguments), num_steps=arguments.steps, as_json=arguments.json)


def _workers(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import workers

    return workers.show(arguments.url, as_json=arguments.json)


def _drain(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import workers

    return workers.drain(arguments.url, arguments.process, undo=arguments.undo, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from gspo_core.cli.doctor import doctor

    return doctor(arguments.url)
