"""``gspo rescore JOB --reward file.py:function``: another reward over the recorded episodes of a job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.terminal import say
from gspo_core.env.loading import load_object
from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.replay.command import folder_of
from gspo_core.replay.past import Past, PastError, kept_range
from gspo_core.replay.rescoring import Decode, Rescored, Reward, rescore
from gspo_core.replay.reward_forms import own_reward, reward_of
from gspo_core.spec import JobSpec

NUM_SHOWN = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Judge the episodes that a job was trained on again. The code of the reward is run here."
    parser.add_argument("job", help="a job's id or directory")
    parser.add_argument(
        "--reward",
        metavar="FILE.py:NAME",
        help="a function of a recorded episode, a class with get_reward, or a judge of agents (default: the job's own)",
    )
    parser.add_argument("--first", type=int, help="from this step on (default: the first that is kept)")
    parser.add_argument("--last", type=int, help="up to this step (default: the last that is kept)")
    parser.add_argument("--model", type=Path, help="where the tokenizer lies (default: the job's model)")
    parser.add_argument("--data-dir", help="where jobs are kept (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="write the rewards that differ, for gspo retrain and fork"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an episode")


def run(arguments: argparse.Namespace) -> int:
    past = Past(folder_of(arguments.job, arguments.data_dir), arguments.model)
    if arguments.to is not None and arguments.to.exists():  # before the work, which may take long
        raise CommandError(f"{arguments.to} is there already")
    try:
        steps = kept_range(past, arguments.first, arguments.last)
        rows = list(rescore(past, chosen_reward(arguments.reward, past.spec), steps, decoder_of(past.spec)))
    except PastError as error:
        raise CommandError(str(error)) from error
    if arguments.to is not None:
        _write(arguments.to, rows)
    if arguments.json:
        for row in rows:
            print(json.dumps(_record(row)))
    else:
        say(*_summary(rows))
    return 0


def chosen_reward(ref: str | None, spec: JobSpec) -> Reward:
    """The one that ``ref`` names, else the job's own. Raises CommandError, PastError."""
    return own_reward(spec) if ref is None else reward_of(load_named(ref), spec)


def load_named(ref: str) -> object:
    """Raises CommandError."""
    name, _, attribute = ref.rpartition(":")
    if not name.endswith(".py") or not attribute:
        raise CommandError(f"{ref}: write FILE.py:NAME, of a class or a function")
    try:
        found = load_object(ref)
    except InvalidEnvironment as error:
        raise CommandError(str(error)) from error
    if not callable(found):
        raise CommandError(f"{name} has no class or function {attribute}")
    return found


def decoder_of(spec: JobSpec) -> Decode | None:
    """None where the model's tokenizer is not there."""
    model = Path(spec.model)
    if not (model / "tokenizer.json").is_file():
        return None
    from gspo_core.chat import load_tokenizer

    return load_tokenizer(model).decode


def _write(file: Path, rows: Sequence[Rescored]) -> None:
    """By episode, as ``gspo retrain`` and ``gspo fork`` read them. Raises CommandError."""
    differing = {f"{row.episode.group}/{row.episode.member}": row.new for row in rows if row.new != row.old}
    try:
        with file.open("x") as target:
            json.dump(differing, target)
    except OSError as error:
        raise CommandError(str(error)) from error


def _summary(rows: Sequence[Rescored]) -> Iterator[str]:
    differing = [row for row in rows if row.new != row.old]
    flipped = [row for row in rows if row.flips]
    yield f"{len(rows)} episodes with a reward; {len(differing)} get another; the advantage of {len(flipped)} flips"
    if rows:
        old, new = (sum(values) / len(rows) for values in ([row.old for row in rows], [row.new for row in rows]))
        yield f"mean reward {old:.6f}, with the other {new:.6f}"
    for row in sorted(flipped, key=lambda one: -abs(one.new_advantage - one.old_advantage))[:NUM_SHOWN]:
        yield (
            f"step {row.step}  {row.episode}  reward {row.old:g} -> {row.new:g}  "
            f"advantage {row.old_advantage:+.4f} -> {row.new_advantage:+.4f}"
        )


def _record(row: Rescored) -> dict[str, float | str | bool]:
    return {
        "step": row.step,
        "episode": str(row.episode),
        "reward": row.old,
        "other_reward": row.new,
        "advantage": row.old_advantage,
        "other_advantage": row.new_advantage,
        "flips": row.flips,
    }
