"""Do steps that are trained again from their logs give the weights that were published, bit for bit?
``python -m benchmarks.replays NAME=DATA_DIR ... [--draws 200] [--seed N]``.

Of each source, data directories that runs have left behind (``make chaos CHAOS_FLAGS=--keep``, ``make demo``,
``benchmarks.replays_played``), as many (job, step) are drawn among all that can be trained again: a batch log is there,
and a version of that step was recorded. Each is replayed from the newest checkpoint before it, or from the base model,
and every published version of the step is compared by the sha256 of its files. No Redis, no engine and no module of the
services is loaded. A step that several ranks trained is trained on as many, under torchrun.

With ``--bundles`` each draw is written as a bundle too, and `gspo replay` opens it in an empty directory, where of this
tree the package `gspo_core` alone can be imported.

``results/replays.jsonl`` keeps a row for each draw, ``results/replays.md`` the table. With ``--more`` the rows that are
there stay, also those of a run that was interrupted, and others are drawn. The exit status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.replays_apart import Opened, replay_apart, replay_bundle
from gspo_core.log import layout
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from tests.ladder.commit import commit_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS, PAGE = RESULTS / "replays.jsonl", RESULTS / "replays.md"
TEXT = """# Steps trained again, bit for bit

Written by `python -m benchmarks.replays` on {day}: {drawn} draws, {seeds}.
{cpus} cores, torch {torch}, load {load:.1f} at the end; neither Redis nor engines; one process, or as many under
torchrun as there were ranks. A step is the same if every file of every version published after it has the bytes that
were published, by sha256. A bundle was opened in an empty directory, where of this tree `gspo_core` alone could be
imported. Rows: `replays.jsonl`.

{table}

{verdict}
"""


@dataclass(frozen=True)
class Place:
    """A step that can be drawn."""

    source: str
    folder: Path
    step: int


@dataclass(frozen=True)
class Row:
    """A step that was drawn, and what came of it."""

    source: str
    job: str
    step: int
    kind: str
    """What is trained: the architecture, and low-rank additions where it is those."""
    max_staleness: int
    """The oldest sampled token in the batch, in steps."""
    num_ranks: int
    epoch: int
    """The trainer that took the step was the job's so many-th."""
    num_replayed: int
    """Logged steps before it that were trained again on the way."""
    versions: int
    is_same: bool
    seconds: float
    seed: int
    """Of the draw."""
    problem: str = ""
    bundle: bool | None = None
    """Whether its bundle led to the same bytes; None where none was written."""
    commit: str = ""
    """Of the tree that replayed it; of older rows nothing is known."""

    @property
    def is_well(self) -> bool:
        return self.is_same and self.bundle is not False


def places(source: str, data_dir: Path) -> Iterator[Place]:
    for folder in sorted((data_dir / layout.JOBS).iterdir()):
        if (folder / layout.BATCHES).is_dir():
            past = Past(folder)
            yield from (Place(source, folder, step) for step in sorted(past.batches) if _is_kept(past, step))


def _is_kept(past: Past, step: int) -> bool:
    try:
        past.way_to(step - 1)
    except PastError:
        return False
    return bool(past.published(step))


def draw(found: Sequence[Sequence[Place]], draws: int, rng: random.Random) -> list[Place]:
    """As many of each source, as far as it has them."""
    chosen: list[Place] = []
    for number, source in enumerate(sorted(found, key=len)):
        share = (draws - len(chosen)) // (len(found) - number)
        chosen += rng.sample(source, min(share, len(source)))
    return chosen


def look(place: Place, seed: int, commit: str, *, bundles: bool) -> Row:
    past, began = Past(place.folder), time.perf_counter()
    batch = past.batch(place.step)
    num_ranks = batch.extra["computed"]["num_ranks"] if "computed" in batch.extra else 1
    found = _here(past, place.step) if num_ranks == 1 else replay_apart(place.folder, place.step, num_ranks)
    seconds = time.perf_counter() - began
    opened = replay_bundle(past, place.step, num_ranks) if bundles else None
    return Row(
        source=place.source,
        job=place.folder.name,
        step=place.step,
        kind=_kind(past),
        max_staleness=max(batch.extra["staleness"].values(), default=0),
        num_ranks=num_ranks,
        epoch=batch.epoch,
        num_replayed=found.num_replayed,
        versions=found.versions,
        is_same=found.is_same,
        seconds=round(seconds, 3),
        seed=seed,
        problem="; ".join(one.problem for one in (found, opened) if one is not None and one.problem),
        bundle=None if opened is None else opened.is_same,
        commit=commit,
    )


def _here(past: Past, step: int) -> Opened:
    said: list[str] = []
    try:
        answer = replay(past, ReplayQuestion(step, step), said.append)
    except (PastError, ValueError, OSError) as error:
        return Opened(is_same=False, versions=0, num_replayed=0, problem=f"{type(error).__name__}: {error}")
    versions = len(answer.steps[0].versions)
    is_same = answer.is_same and versions > 0
    problem = "" if is_same else "; ".join(one for one in said if not one.endswith("trained again"))
    return Opened(is_same=is_same, versions=versions, num_replayed=answer.num_replayed, problem=problem)


def _kind(past: Past) -> str:
    config = json.loads((Path(past.spec.model) / "config.json").read_text())
    name = config["architectures"][0].removesuffix("ForCausalLM")
    return f"{name}, LoRA" if past.spec.learner.lora is not None else name


def page(rows: Sequence[Row]) -> str:
    head = [
        "source",
        "trained",
        "ranks",
        "jobs",
        "steps drawn",
        "bit for bit",
        "bundles, bit for bit",
        "with stale tokens",
        "after a takeover",
        "replayed before, mean",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for source, kind, ranks in sorted({(row.source, row.kind, row.num_ranks) for row in rows}):
        some = [row for row in rows if (row.source, row.kind, row.num_ranks) == (source, kind, ranks)]
        opened = [row.bundle for row in some if row.bundle is not None]
        cells = [
            *(source, kind, ranks, len({row.job for row in some}), len(some), sum(row.is_same for row in some)),
            f"{sum(opened)} of {len(opened)}",
            *(sum(row.max_staleness > 0 for row in some), sum(row.epoch > 1 for row in some)),
            f"{sum(row.num_replayed for row in some) / len(some):.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return TEXT.format(
        day=datetime.now(UTC).date(),
        seeds=f"seed {', '.join(map(str, dict.fromkeys(row.seed for row in rows)))}",
        drawn=len(rows),
        cpus=os.cpu_count(),
        torch=torch.__version__,
        load=os.getloadavg()[0],
        table="\n".join(lines),
        verdict=_verdict(rows),
    )


def _verdict(rows: Sequence[Row]) -> str:
    seconds = sorted(row.seconds for row in rows)
    same = f"{sum(row.is_same for row in rows)} of {len(rows)} bit for bit"
    problems = Counter(row.problem or "the weights differ" for row in rows if not row.is_well)
    others = "".join(f"\n- {count}: {problem}" for problem, count in problems.most_common())
    median = f"{same}; a replay took {seconds[len(seconds) // 2]:.2f} s (median), at most {seconds[-1]:.2f} s."
    return f"{median}{''.join(_at_commits(rows))}{others}"


def _at_commits(rows: Sequence[Row]) -> Iterator[str]:
    for commit in dict.fromkeys(row.commit for row in rows if row.commit):
        some = [row for row in rows if row.commit == commit]
        opened = [row.bundle for row in some if row.bundle is not None]
        yield f" Of these, at commit {commit}: {sum(row.is_same for row in some)} of {len(some)},"
        yield f" and {sum(opened)} of {len(opened)} bundles."


def kept() -> list[Row]:
    return [Row(**json.loads(line)) for line in ROWS.read_text().splitlines()]


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", metavar="NAME=DATA_DIR", help="directories named alike are one source")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the draw; left out: drawn")
    parser.add_argument("--bundles", action="store_true", help="open a bundle of each draw too")
    parser.add_argument("--more", action="store_true", help="keep the rows that are there")
    given = parser.parse_args(None if argv is None else list(argv))
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    sources: dict[str, list[Place]] = {}
    for name, _, folder in (one.partition("=") for one in given.data):
        sources.setdefault(name, []).extend(places(name, Path(folder)))
    rows = kept() if given.more else []
    known = {(row.source, row.job, row.step) for row in rows}
    left = [
        [place for place in found if (place.source, place.folder.name, place.step) not in known]
        for found in sources.values()
    ]
    chosen = draw(left, given.draws, random.Random(seed))
    print(f"seed {seed}: {len(chosen)} of {sum(map(len, left))} steps", flush=True)
    commit = commit_of(ROOT, (str(ROWS.relative_to(ROOT)), str(PAGE.relative_to(ROOT))))
    with ROWS.open("a" if given.more else "w") as file:
        for place in chosen:
            rows.append(look(place, seed, commit, bundles=given.bundles))
            file.write(f"{json.dumps(asdict(rows[-1]))}\n")
            file.flush()
            print(rows[-1], flush=True)
    assert not any(name.partition(".")[0] in ("services", "redis") for name in sys.modules)
    PAGE.write_text(page(rows))
    print(PAGE.read_text())
    return 0 if all(row.is_well for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
