"""Where the time of the test suite goes: ``python -m benchmarks.test_time RESULT.json [FLAGS OF PYTEST]``, then
``python -m benchmarks.test_time --table BEFORE.json AFTER.json``. ``--order RESULT.json`` writes ``tests/heaviest.py``.

Processor time, of the test's process and of all children that it waited for, since it changes little when the machine
is shared. What a child that is never waited for takes appears in the total alone, which is of the whole tree. What is
forked from a warm interpreter counts for the test in which it ends. As a plugin of pytest (``-p benchmarks.test_time``)
this notes one line a test where ``GSPO_TEST_TIME`` says.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.apparatus.warm_python import WarmPython

PLACE = "GSPO_TEST_TIME"
NORMAL = ("-m", "not slow and not third_party and not browser and not quarantined")
NUM_SHOWN = 40
# Files that took less come in any order: what they leave uneven at the end is shorter than this.
LONG_S = 5.0
ORDER = Path(__file__).parents[1] / "tests" / "heaviest.py"
HEAD = '''"""The files of tests that take longest, the longest first; `python -m benchmarks.test_time --order` wrote it.

It decides what workers begin with, and nothing else: an order that is out of date costs a minute at the end.
"""

from __future__ import annotations

HEAVIEST = (
'''
_COLLECTION = "(imports and collection)"

# As a plugin: in each worker


def cpu_s() -> float:
    times = os.times()
    forked = sum(warm.spent_s() for warm in WarmPython.opened)
    return times.user + times.system + times.children_user + times.children_system + forked


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items:
        _note({"test": _COLLECTION, "cpu_s": cpu_s(), "wall_s": 0.0, "ended": time.time()})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    cpu, wall = cpu_s(), time.monotonic()
    result = yield
    _note({"test": item.nodeid, "cpu_s": cpu_s() - cpu, "wall_s": time.monotonic() - wall, "ended": time.time()})
    return result


def _note(row: dict[str, Any]) -> None:
    if directory := os.environ.get(PLACE):
        row["worker"] = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with (Path(directory) / f"{row['worker']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


# As a command


def measured(flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        load, begun = os.getloadavg()[0], time.time()
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.test_time", *NORMAL, *flags]
        code = subprocess.run(argv, env={**os.environ, PLACE: directory}).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [json.loads(line) for file in Path(directory).iterdir() for line in file.read_text().splitlines()]
    return {
        "flags": flags,
        "code": code,
        "load": [load, os.getloadavg()[0]],
        "wall_s": time.time() - begun,
        "cpu_s": used.ru_utime + used.ru_stime,
        "alone_s": _alone_s(rows),
        "rows": rows,
    }


def _alone_s(rows: list[dict[str, Any]]) -> float:
    """How long the last worker went on when all others had nothing left to do."""
    ends: dict[str, float] = {}
    for row in rows:
        ends[row["worker"]] = max(ends.get(row["worker"], 0.0), row["ended"])
    last = sorted(ends.values())
    return last[-1] - last[-2] if len(last) > 1 else 0.0


def by_file(result: dict[str, Any]) -> Counter[str]:
    spent: Counter[str] = Counter()
    for row in result["rows"]:
        spent[row["test"].partition("::")[0]] += row["cpu_s"]
    return spent


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    lines = ["| | before | after |", "|---|---|---|"]
    for name, key in (("wall", "wall_s"), ("CPU of the whole tree", "cpu_s"), ("the last worker alone", "alone_s")):
        lines.append(f"| {name}, s | {before[key]:.0f} | {after[key]:.0f} |")
    loads = (" to ".join(f"{one:.1f}" for one in run["load"]) for run in (before, after))
    tests = (str(len(run["rows"]) - len({row["worker"] for row in run["rows"]})) for run in (before, after))
    lines += [f"| load | {' | '.join(loads)} |", f"| tests | {' | '.join(tests)} |"]
    first, second = by_file(before), by_file(after)
    lines += ["", "| file | CPU s before | after |", "|---|---|---|"]
    heaviest = sorted(first | second, key=lambda name: -max(first[name], second[name]))
    lines += [f"| `{name}` | {first[name]:.0f} | {second[name]:.0f} |" for name in heaviest[:NUM_SHOWN]]
    rest = [sum(one[name] for name in heaviest[NUM_SHOWN:]) for one in (first, second)]
    return "\n".join([*lines, f"| {max(0, len(heaviest) - NUM_SHOWN)} others | {rest[0]:.0f} | {rest[1]:.0f} |"])


def order(result: dict[str, Any]) -> str:
    """The files that keep a worker longest, as source. Waiting counts too."""
    took: Counter[str] = Counter()
    for row in result["rows"]:
        took[row["test"].partition("::")[0]] += row["wall_s"]
    long = [name.removeprefix("tests/") for name, wall_s in took.most_common() if wall_s >= LONG_S]
    return HEAD + "".join(f'    "{name}",\n' for name in long) + ")\n"


def main(argv: list[str]) -> None:
    if argv[0] == "--order":
        ORDER.write_text(order(json.loads(Path(argv[1]).read_text())))
        return
    if argv[0] == "--table":
        print(table(*(json.loads(Path(name).read_text()) for name in argv[1:3])))
        return
    Path(argv[0]).write_text(json.dumps(measured(argv[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
