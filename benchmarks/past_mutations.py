"""Is each single byte that differs refused by name? ``python -m benchmarks.past_mutations JOB_DIR@FIRST-LAST ...
[--mutations 50] [--seed N]``: of a bundle of these steps, and of all that an audit reads of the job (a copy of its
directory) with the chain that was kept.

Files are drawn in turn, bytes and bits at random. ``results/past_mutations.md`` has what was looked at; the exit status
is 1 if a mutation was believed, or the refusal did not name what differs. ``tests/core/test_past_mutations.py`` does
the same to a job in miniature, some of whose logs are archived, and one erased.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gspo_core.cli import main as gspo
from gspo_core.log import layout
from gspo_core.replay.bundle import BadBundle, unpack, write_bundle
from gspo_core.replay.command import parse_where
from gspo_core.replay.past import Past

PAGE = Path(__file__).parent / "results" / "past_mutations.md"
READ = (layout.ACCEPTED, layout.BATCHES, layout.ARCHIVE, layout.CHECKPOINTS, layout.VERSIONS, layout.WEIGHTS)
"""What an audit reads; docs/time-machine.md says what else lies there."""
TEXT = """# Single bytes that differ

Written by `python -m benchmarks.past_mutations` on {day}, seed {seed}, {cpus} cores, load {load:.1f}. One bit of a file
was turned at a time: of a bundle, and of what an audit reads of the job, its kept chain among that. Refused means with
status 1 and a message that names the file, or what it holds.
{about}
{table}
"""


@dataclass(frozen=True)
class Mutation:
    of: str
    """The kind of file."""
    said: str
    is_refused: bool
    is_named: bool


def mutations_of_bundle(past: Past, first: int, last: int, number: int, rng: random.Random) -> Iterator[Mutation]:
    """Of each file in the bundle in turn: of its header, its bytes, or the directory behind them."""
    with tempfile.TemporaryDirectory() as scratch:
        path, changed, out = (Path(scratch) / name for name in ("steps.gspo", "changed.gspo", "out"))
        write_bundle(past, past.folder.name, first, last, path)
        whole = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            ends = [*(one.header_offset for one in members[1:]), archive.start_dir]
        parts = [(one.filename, one.header_offset, end) for one, end in zip(members, ends, strict=True)]
        parts.append((changed.name, archive.start_dir, len(whole)))
        for at in range(number):
            name, begin, end = parts[at % len(parts)]
            changed.write_bytes(turned(whole, rng, begin, end))
            try:
                unpack(changed, out)
            except BadBundle as error:
                said, is_refused = str(error), not out.exists()
            else:
                said, is_refused = "", False
                shutil.rmtree(out)
            yield Mutation(f"bundle: {kind_of(name)}", said, is_refused, name in said or changed.name in said)


def mutations_of_past(folder: Path, number: int, rng: random.Random) -> Iterator[Mutation]:
    """Of a copy; of each kind of file in turn, the kept chain among them."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, chain = Path(scratch) / folder.name, Path(scratch) / "job.chain"
        for name in READ:
            if (folder / name).is_file():
                copy.mkdir(exist_ok=True)
                shutil.copy(folder / name, copy / name)
            elif (folder / name).is_dir():
                shutil.copytree(folder / name, copy / name)
        status, said = asked("audit", str(copy), "--to", str(chain))
        assert status == 0, said
        kinds: dict[str, list[Path]] = {}
        for path in sorted(one for one in Path(scratch).rglob("*") if one.is_file() and one.stat().st_size):
            kinds.setdefault(kind_of(path.relative_to(scratch).as_posix()), []).append(path)
        for at in range(number):
            kind = sorted(kinds)[at % len(kinds)]
            path = rng.choice(kinds[kind])
            whole = path.read_bytes()
            path.write_bytes(turned(whole, rng, 0, len(whole)))
            status, said = asked("audit", str(copy), "--chain", str(chain))
            path.write_bytes(whole)
            yield Mutation(kind, said, status == 1, any(name in said for name in names_of(path)))
        assert asked("audit", str(copy), "--chain", str(chain))[0] == 0, "what was turned is turned back"


def turned(whole: bytes, rng: random.Random, begin: int, end: int) -> bytes:
    data = bytearray(whole)
    data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return bytes(data)


def asked(*words: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = gspo(list(words))
    return status, said.getvalue()


def kind_of(path: str) -> str:
    """Names without their numbers."""
    parts = [part for part in path.split("/") if not part.startswith("job_")]
    return "/".join("".join("0" if letter.isdigit() else letter for letter in part) for part in parts) or path


def names_of(path: Path) -> list[str]:
    """How a message may name a file, or the step or version that it is of."""
    names = [path.name] if path.name != layout.CHECKPOINT_MANIFEST.split("/")[-1] else []
    for part in (*path.parts[-4:-1], path.name):
        with contextlib.suppress(TypeError, ValueError):
            at = layout.parse_step_name(part)
            names += [part] if at is not None else []
        if part.removesuffix(".json").isdigit() and path.parent.name == layout.VERSIONS:
            names.append(f"version {int(path.stem)}")
        if part.startswith("v") and part[1:].isdigit():
            names += [f"version {int(part[1:])}", part]
    return [*names, "chain"] if path.suffix == ".chain" else names


def table(found: Sequence[tuple[str, Mutation]]) -> str:
    lines = ["| job | file | mutations | refused | by name |", "|---|---|---|---|---|"]
    for job, kind in Counter((job, one.of) for job, one in found):
        some = [one for other, one in found if (other, one.of) == (job, kind)]
        cells = (job, f"`{kind}`", len(some), sum(one.is_refused for one in some), sum(one.is_named for one in some))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", metavar="JOB_DIR@FIRST-LAST")
    parser.add_argument("--mutations", type=int, default=50, help="of the bundle, and as many of the past")
    parser.add_argument("--seed", type=int, help="left out: drawn")
    parser.add_argument("--about", default="", help="what jobs these are, for the page")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    rng, found = random.Random(seed), list[tuple[str, Mutation]]()
    for where in given.where:
        folder, first, last = parse_where(where)
        place = Path(folder).resolve()
        for one in mutations_of_bundle(Past(place), first, last, given.mutations, rng):
            found.append((place.name, one))
        for one in mutations_of_past(place, given.mutations, rng):
            found.append((place.name, one))
    for job, one in found:
        if not (one.is_refused and one.is_named):
            print(f"{job}: {one}")
    about = f"\n{given.about}\n" if given.about else ""
    values = {"about": about, "seed": seed, "cpus": os.cpu_count(), "load": os.getloadavg()[0], "table": table(found)}
    PAGE.write_text(TEXT.format(day=datetime.now(UTC).date(), **values))
    print(PAGE.read_text())
    return 0 if all(one.is_refused and one.is_named for _, one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
