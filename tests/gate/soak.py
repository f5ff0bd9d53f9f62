"""`python -m tests.gate.soak --times N FILE ...` (`make soak`): files of tests again and again, to find what fails once
in twenty times before CI does.

Each time in one interpreter, with two other files drawn from the suite, in a drawn order, on a machine that others keep
busy. What a seed draws is said, so that it can be drawn again; what happens between two processes is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.gate.ends import Ends

ROOT = Path(__file__).parents[2]
LOGS = ROOT / ".make" / "soak"
NUM_OTHERS = 2
# Beside two cores: each process of a test gets about a seventh of one.
NUM_BUSY = 6
NORMAL = "not slow and not third_party and not browser and not quarantined"
NOTHING_TO_DO = 5


def main() -> int:
    arguments = _parser().parse_args()
    files = [str(Path(one)) for one in arguments.files]
    if missing := [one for one in files if not (ROOT / one).is_file()]:
        print(f"there is no file {', '.join(missing)}")
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    found: Counter[str] = Counter()
    with busy(arguments.busy):
        for number in range(arguments.times):
            found.update(_once(files, seed + number, f"{number + 1} of {arguments.times}"))
    for test, count in found.most_common():
        print(f"soak: {count} of {arguments.times} times: {test}")
    print(f"soak: {len(files)} files, {arguments.times} times, seeds from {seed}: {'RED' if found else 'all is well'}")
    return 1 if found else 0


def _once(files: Sequence[str], seed: int, place: str) -> list[str]:
    chosen = [*files, *others(files, random.Random(seed))]
    record, log = LOGS / f"{seed}.jsonl", LOGS / f"{seed}.log"
    record.unlink(missing_ok=True)
    drawn = ["-p", "tests.gate.shuffle", "--shuffle", str(seed)]
    argv = ["-m", "pytest", "-q", "-m", NORMAL, "-p", "tests.gate.record", "--record", str(record), *drawn, *chosen]
    with log.open("wb") as kept:
        status = subprocess.run([sys.executable, *argv], cwd=ROOT, stdout=kept, stderr=kept, check=False).returncode
    failed = [one.test for one in Ends.read(record).failures()]
    if status not in (0, NOTHING_TO_DO) and not failed:
        failed = [f"pytest ended with status {status}: {log.relative_to(ROOT)}"]
    beside = ", ".join(chosen[len(files) :])
    print(f"soak: {place}, seed {seed}, beside {beside}: {'; '.join(failed) or 'passed'}", flush=True)
    return failed


def others(files: Sequence[str], draw: random.Random) -> list[str]:
    """Files of the suite that share the interpreter."""
    suite = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return draw.sample([one for one in suite if one not in files], NUM_OTHERS)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that compute for nothing."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gate.soak", description=__doc__)
    parser.add_argument("files", nargs="+", help="files of tests")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the first time; left out: drawn")
    parser.add_argument("--busy", type=int, default=NUM_BUSY, help="processes that compute beside it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
