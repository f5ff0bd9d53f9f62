"""Parts one after the other, each bounded in time, and what became of each check kept: a run can be gone on with.

A check that passed is not run again while nothing has changed: not the code, nor the device, nor the size. What parts
need before they can begin is made by a process of its own, while those before them run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import PREPARE, Place, Result, place_record
from benchmarks.gpu.parts import Part
from services.process.children import die_with_parent

ROOT = Path(__file__).parents[2]
CODE = (
    "gspo_core",
    "services",
    "environments",
    "examples",
    "benchmarks/gpu",
    "benchmarks/learner.py",
    "benchmarks/model_shapes.py",
    "tests/core/learner_support.py",
)
KINDS = frozenset({".py", ".yaml", ".lua"})
END = "its end"
"""Not a check: what became of a part's process after its last one."""
PREPARATION_S = 180.0
LEAST_S = 10.0
"""A part does not begin with less."""
MOST_LOG_BYTES = 200_000


@dataclass(frozen=True)
class How:
    again: bool = False
    """Also what passed before."""
    within_s: float | None = None
    """All parts together."""
    limit_s: float | None = None
    """Each part, in place of its own limit."""


@dataclass(frozen=True)
class Ran:
    """What became of a part."""

    part: Part
    results: tuple[Result, ...]
    seconds: float
    kept: frozenset[str] = frozenset()
    """Names of the checks that passed in an earlier run."""


def code_digest() -> str:
    """Of what is tried, where git may not be."""
    digest = hashlib.sha256()
    for name in CODE:
        place = ROOT / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in KINDS and path.is_file():
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def conditions(place: Place, device_name: str) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "code": code_digest(),
        "device": device_name,
        "num_gpus": place.num_gpus,
        "is_toy": place.is_toy,
        "trl": place.trl and str(place.trl),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def command_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.part", *words]


class Preparation:
    """One process that makes what parts need, in their order, while others run. A context manager: it ends with it."""

    def __init__(self, parts: Sequence[Part], place: Place, out: Path) -> None:
        self._log, self._done = out / "preparation.log", out / "prepared"
        self._done.write_text("")
        self._process: subprocess.Popen[bytes] | None = None
        if needy := [part.name for part in parts if part.prepare is not None]:
            asked = _written(out / "preparation.place.json", place_record(place))
            with self._log.open("wb") as errors:
                self._process = _started(command_of(PREPARE, str(asked), str(self._done), *needy), errors)

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)

    def why_not(self, part: Part, ends: float | None) -> str:
        """Waits for what it needs, until ``ends`` at most. Empty where all is there."""
        if part.prepare is None or self._process is None:
            return ""
        until = min(time.monotonic() + PREPARATION_S, math.inf if ends is None else ends)
        while part.name not in self._done.read_text().split("\n"):
            status = self._process.poll()
            if status is not None and part.name not in self._done.read_text().split("\n"):
                return f"{_end_of(self._log)}\nwhat it needs could not be made (status {status})".strip()
            if time.monotonic() > until:
                return "what it needs was not ready in time: typed again, it goes on"
            time.sleep(0.05)
        return ""


def run_parts(parts: Sequence[Part], place: Place, out: Path, given: Mapping[str, Any], how: How) -> Iterator[Ran]:
    """Each as it ends."""
    ends = None if how.within_s is None else time.monotonic() + how.within_s
    kept = {part.name: {} if how.again else _passed_before(out, part, given) for part in parts}
    still = [part for part in parts if len(kept[part.name]) < len(part.checks)]
    with Preparation(still, place, out) as preparation:
        for part in parts:
            print(f"{part.name}: {part.words}", flush=True)
            limit_s = how.limit_s or part.limit_s
            why = preparation.why_not(part, ends) if part in still else ""
            left_s = math.inf if ends is None else ends - time.monotonic()
            limit_s = min(limit_s, left_s) if left_s >= LEAST_S else 0.0
            yield run_part(part, place, out, given, kept[part.name], limit_s, unready=why)


def run_part(
    part: Part,
    place: Place,
    out: Path,
    given: Mapping[str, Any],
    kept: Mapping[str, Result],
    limit_s: float,
    *,
    unready: str = "",
) -> Ran:
    """``kept``: what passed before, and is not run again."""
    names = [one.name for one in part.checks if one.name not in kept]
    if not names:
        return Ran(part, tuple(kept.values()), 0.0, frozenset(kept))
    began = time.monotonic()
    if not limit_s:
        found = [Result(name, "did not run", "there was no time left for it") for name in names]
    elif unready:
        found = _unfinished(names, unready)
    else:
        found = _run(part, names, place, out, given, kept, limit_s)
    known = {**kept, **{one.name: one for one in found}}
    ordered = [*(one.name for one in part.checks), END]
    ran = Ran(part, tuple(known[name] for name in ordered if name in known), time.monotonic() - began, frozenset(kept))
    _written(
        out / f"{part.name}.json", {**given, "seconds": ran.seconds, "results": [asdict(one) for one in ran.results]}
    )
    (out / f"{part.name}.jsonl").unlink(missing_ok=True)
    return ran


def _passed_before(out: Path, part: Part, given: Mapping[str, Any]) -> dict[str, Result]:
    """What passed under the same conditions, by name. Nothing, where the process of all that did not end well."""
    record, results = _read_record(out / f"{part.name}.json")
    first, lines = _read_lines(out / f"{part.name}.jsonl")  # of a run that was ended from outside
    names = {one.name for one in part.checks}
    passed: dict[str, Result] = {}
    for conditions, found in ((record, results), (first, lines)):
        if all(conditions.get(key) == value for key, value in given.items()):
            passed |= {one.name: one for one in found if one.became == "passed" and one.name in names}
    ended_badly = len(passed) == len(names) and any(one.name == END for one in results)
    return {} if ended_badly else passed


def _run(
    part: Part,
    names: Sequence[str],
    place: Place,
    out: Path,
    given: Mapping[str, Any],
    kept: Mapping[str, Result],
    limit_s: float,
) -> list[Result]:
    lines, log = out / f"{part.name}.jsonl", out / f"{part.name}.log"
    before = [given, *(asdict(one) for one in kept.values())]
    lines.write_text("".join(f"{json.dumps(one)}\n" for one in before))
    asked = _written(out / f"{part.name}.place.json", place_record(place))
    with log.open("wb") as errors:
        process = _started(command_of(part.name, str(asked), str(lines), *names), errors)
        try:
            status = process.wait(limit_s)
            why = f"its process ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"{limit_s:.0f} s were over: typed again it goes on here, and --limit gives it more"
        finally:
            _end(process)
    results = [one for one in _read_lines(lines)[1] if one.name in names]
    left = names[len(results) :]
    if left:
        results += _unfinished(left, f"{_end_of(log)}\n{why or 'its process said no more'}".strip())
    elif why:
        results.append(Result(END, "failed", f"{_end_of(log)}\n{why}".strip()))
    if any(one.became == "failed" for one in results):
        _keep_logs(place.folder, out / f"{part.name}.logs")
    return results


def _keep_logs(folder: Path, target: Path) -> None:
    """Ends of what processes of a service wrote, before their folder goes."""
    for path in folder.rglob("*.log"):
        target.mkdir(exist_ok=True)
        name = "-".join(path.relative_to(folder).parts)
        (target / name).write_bytes(path.read_bytes()[-MOST_LOG_BYTES:])


def _read_record(path: Path) -> tuple[Mapping[str, Any], list[Result]]:
    """Nothing, where it is not there or not whole."""
    try:
        record = json.loads(path.read_text())
        return record, [Result(**one) for one in record["results"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, []


def _read_lines(lines: Path) -> tuple[Mapping[str, Any], list[Result]]:
    """Conditions, and results that are whole: the last one may have been cut."""
    first, *others = (lines.read_text().splitlines() if lines.exists() else []) or [""]
    conditions, found = {}, []
    with contextlib.suppress(ValueError):
        conditions = json.loads(first)
    for line in others:
        with contextlib.suppress(ValueError, TypeError):
            found.append(Result(**json.loads(line)))
    return conditions, found


def _unfinished(names: Sequence[str], why: str) -> list[Result]:
    """The check that was at work, and those behind it."""
    first, *others = names
    return [
        Result(first, "failed", why),
        *(Result(one, "did not run", f"{first} took the part along") for one in others),
    ]


def _started(command: list[str], errors: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True, preexec_fn=die_with_parent())


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """With all that it started."""
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _written(path: Path, record: Mapping[str, Any]) -> Path:
    """Whole or not at all."""
    half = path.with_name(f".{path.name}.half")
    half.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(half, path)
    return path


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-2000:]
