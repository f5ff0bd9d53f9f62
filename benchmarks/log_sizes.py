"""How does the directory of a job grow? ``python -m benchmarks.log_sizes NAME=DATA_DIR ...``

Reads what runs have left behind. Of each source: bytes of a batch log for each token and for each trained one, as it is
written and as `checkpoints.archive: all` keeps it, the time that takes, and what else is written for a step.
``results/log_sizes.md`` has the tables.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gspo_core import codec
from gspo_core.log import layout
from gspo_core.log.archive import pack, plain
from gspo_core.log.batches import decode_batch

PAGE = Path(__file__).parent / "results" / "log_sizes.md"
# Beside the logs: what is written for each step, and what is kept in a number that the job says.
FOR_EACH_STEP = (layout.TRAINED, layout.VERSIONS, layout.METRICS)
KEPT_IN_NUMBER = (layout.WEIGHTS, layout.CHECKPOINTS)
TEXT = """# How the directory of a job grows

Written by `python -m benchmarks.log_sizes` on {day}, {cpus} cores, from jobs of small models that runs had left. Sizes
are exact; seconds are CPU time of one process, load {load:.1f}. A trained token is one that was sampled and trained;
prompts, answers of tools and everything else that is read are in the log too.

Batch logs, as written, and archived (`checkpoints.archive: all`):

{logs}

What else grows with each step, in bytes a step, and what is kept in a number that the job says
(`checkpoints.keep_versions`, `checkpoints.keep`), in bytes each:

{others}

`status/`, `environments/` and the records of forks grow with attempts, not with steps. A segment has at most {overhead}
bytes beside its 9 a token.
"""


@dataclass
class Sizes:
    steps: int = 0
    tokens: int = 0
    trained: int = 0
    raw: int = 0
    packed: int = 0
    seconds: float = 0.0
    overhead: int = 0
    others: dict[str, list[int]] = field(default_factory=dict)
    """Bytes and number of entries of each kind."""


def measure(data_dir: Path, sizes: Sizes) -> None:
    for job in sorted((data_dir / layout.JOBS).iterdir()):
        for path in sorted((job / layout.BATCHES).glob("ep*")):
            _add_log(plain(path.read_bytes()), sizes)
        for kind in (*FOR_EACH_STEP, *KEPT_IN_NUMBER):
            place = job / kind
            names = [one for one in place.glob("[ev0-9]*") if "epoch" not in one.name] if place.is_dir() else []
            found = sizes.others.setdefault(kind, [0, 0])
            found[0] += place.stat().st_size if place.is_file() else sum(map(_size, names))
            found[1] += len(names)


def _size(path: Path) -> int:
    return (
        path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    )


def _add_log(log: bytes, sizes: Sizes) -> None:
    began = time.process_time()
    packed = pack(log)
    sizes.seconds += time.process_time() - began
    batch = decode_batch(log)
    segments = [one for episode in batch.trajectories for one in episode.segments]
    sizes.steps += 1
    sizes.tokens += sum(one.num_tokens for one in segments)
    sizes.trained += sum(episode.num_actions for episode in batch.trajectories)
    sizes.raw += len(log)
    sizes.packed += len(packed)
    overheads = (len(codec.encode(one)) - 9 * one.num_tokens for one in segments)
    sizes.overhead = max(sizes.overhead, *overheads)


def page(found: dict[str, Sizes]) -> str:
    head = ["source", "steps", "KB a step", "B a token", "B a trained token", "archived", "B a trained token", "MB/s"]
    logs = [_row(head), "|---" * len(head) + "|"]
    for name, one in found.items():
        each = f"{one.raw / one.steps / 1e3:.1f}", f"{one.raw / one.tokens:.1f}", f"{one.raw / one.trained:.1f}"
        kept = f"{one.packed / one.raw:.1%}", f"{one.packed / one.trained:.1f}", f"{one.raw / one.seconds / 1e6:.0f}"
        logs.append(_row([name, str(one.steps), *each, *kept]))
    kinds = [*FOR_EACH_STEP, *KEPT_IN_NUMBER]
    others = [_row(["source", *(f"`{kind}`" for kind in kinds)]), "|---" * (len(kinds) + 1) + "|"]
    for name, one in found.items():
        cells = []
        for kind in kinds:
            size, count = one.others[kind]
            cells.append(f"{size / (one.steps if kind in FOR_EACH_STEP else max(1, count)):,.0f}")
        others.append(_row([name, *cells]))
    return TEXT.format(
        day=datetime.now(UTC).date(),
        cpus=os.cpu_count(),
        load=os.getloadavg()[0],
        logs="\n".join(logs),
        others="\n".join(others),
        overhead=max(one.overhead for one in found.values()),
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", metavar="NAME=DATA_DIR", help="directories named alike are one source")
    found: dict[str, Sizes] = {}
    for name, _, folder in (one.partition("=") for one in parser.parse_args().data):
        measure(Path(folder), found.setdefault(name, Sizes()))
    PAGE.write_text(page(found))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
