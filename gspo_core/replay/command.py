"""``gspo replay JOB@STEP``: train logged steps again and compare, without Redis and without engines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.terminal import say
from gspo_core.learner import Ranks
from gspo_core.log import layout
from gspo_core.log.changes import ImpossibleChange, Without, parse_assignments
from gspo_core.replay import splitting, telling
from gspo_core.replay.bundle import check_model, unpack
from gspo_core.replay.journey import say_nothing
from gspo_core.replay.on_ranks import met
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.question import ReplayQuestion, parse_episode
from gspo_core.replay.replaying import replay

# No job has a step of sixteen digits.
_WHERE = re.compile(r"(?P<job>.+)@(?P<first>[0-9]{1,15})(?:-(?P<last>[0-9]{1,15}))?")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train logged steps of a job again from the checkpoint before them, and compare the weights with those that "
        "were published. Exit status 1 if they differ."
    )
    parser.add_argument("where", metavar="JOB@STEP", help="a job's id, directory or bundle, and a step or FIRST-LAST")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with another setting")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="GROUP|EPISODE|PART",
        help="without a group (17), an episode (17/3) or a part of the reward (its name)",
    )
    parser.add_argument("--single", metavar="EPISODE", help="show every token of one episode (17/3) in the step's loss")
    parser.add_argument(
        "--influence",
        action="store_true",
        help="rank the groups by how far each pulled the weights",
    )
    parser.add_argument(
        "--split-ratio",
        action="store_true",
        help="split the tokens' log ratios into mismatch of engine and trainer, staleness, and update",
    )
    parser.add_argument("--model", type=Path, help="where the base model lies (default: where the job says)")
    parser.add_argument("--data-dir", help="where jobs are kept (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    job, first, last = parse_where(arguments.where)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(met())
        past = _past(job, arguments.data_dir, arguments.model, stack)
        if arguments.split_ratio:
            return _split(past, first, last, arguments)
        return _replay(past, first, last, arguments, is_first=ranks.is_first)


def _past(job: str, data_dir: str | None, model: Path | None, stack: contextlib.ExitStack) -> Past:
    """The past in a directory, or in a bundle, which is unpacked for as long as ``stack`` is open."""
    if not Path(job).is_file():
        return Past(folder_of(job, data_dir), model)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gspo-bundle-")))
    try:
        opened = unpack(Path(job), folder)
        past = Past(folder, model)
        check_model(opened.manifest, Path(past.spec.model))
    except (PastError, OSError) as error:
        raise CommandError(str(error)) from error
    return past


def _replay(past: Past, first: int, last: int, arguments: argparse.Namespace, *, is_first: bool) -> int:
    try:
        question = ReplayQuestion(
            first,
            last,
            settings=parse_assignments(arguments.set),
            without=Without.parse(arguments.without),
            single=parse_episode(arguments.single),
            influence=arguments.influence,
        )
        answer = replay(past, question, _say if is_first else say_nothing)
    except (PastError, ImpossibleChange, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if question.single is not None and answer.single is None:
        raise CommandError(f"episode {arguments.single} was not trained in these steps")
    if not is_first:
        return 0
    if arguments.json:
        print(json.dumps(telling.as_record(answer), indent=1))
    else:
        say(*telling.as_text(answer))
    return 0 if answer.is_same else 1


def _split(past: Past, first: int, last: int, arguments: argparse.Namespace) -> int:
    if arguments.set or arguments.without or arguments.single or arguments.influence:
        raise CommandError("--split-ratio is of a step as it was: leave --set, --without, --single, --influence out")
    if Ranks.current().num_ranks > 1:
        raise CommandError("--split-ratio works on one rank")
    try:
        splits = [splitting.split_step(past, step, _say) for step in range(first, last + 1)]
    except (PastError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        print(json.dumps([splitting.as_record(one) for one in splits], indent=1))
    else:
        say(*(line for one in splits for line in splitting.as_text(one)))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_where(text: str) -> tuple[str, int, int]:
    """Raises CommandError."""
    match = _WHERE.fullmatch(text)
    if match is None:
        raise CommandError(f"{text}: write JOB@STEP or JOB@FIRST-LAST")
    first = int(match["first"])
    last = int(match["last"] or first)
    if not 1 <= first <= last:
        raise CommandError(f"{text}: steps count from 1, and the last is not before the first")
    return match["job"], first, last


def folder_of(job: str, data_dir: str | None) -> Path:
    """The directory of a job: one that is named, or the one of this id below the data directory."""
    if (Path(job) / layout.ACCEPTED).is_file():
        return Path(job)
    root = Path(data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo"))
    folder = layout.job_folder(root, job)
    if not folder.is_dir():
        raise CommandError(f"there is no job {job} in {root}: name the data directory with --data-dir")
    return folder
