"""Parts one after the other, each bounded in time, and what became of each check kept: a run can be gone on with.

A check that passed is not run again while nothing has changed: not the code, nor the device, nor the size. What a part
needs before it can begin is made by a process of its own, while the part before it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
    """A process that makes what a part needs. Use it as a context manager, to end it with whoever waits for it."""

    def __init__(self, part: Part, place: Place, out: Path) -> None:
        self._log = out / f"{part.name}.preparation.log"
        self._process: subprocess.Popen[bytes] | None = None
        if part.prepare is not None:
            asked = _written(out / f"{part.name}.place.json", place_record(place))
            with self._log.open("wb") as errors:
                self._process = _started(command_of(part.name, str(asked), PREPARE), errors)

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)

    def why_not(self) -> str:
        """Waits for it. Empty where all is there."""
        if self._process is None:
            return ""
        try:
            status = self._process.wait(PREPARATION_S)
        except subprocess.TimeoutExpired:
            return f"what it needs was not ready after {PREPARATION_S:.0f} s"
        return f"{_end_of(self._log)}\nwhat it needs could not be made (status {status})" if status else ""


def run_parts(parts: Sequence[Part], place: Place, out: Path, given: Mapping[str, Any], *, again: bool) -> list[Ran]:
    ran: list[Ran] = []
    with contextlib.ExitStack() as stack:
        ready = [stack.enter_context(Preparation(parts[0], place, out))] if parts else []
        for number, part in enumerate(parts):
            why = ready[number].why_not()
            ready += [stack.enter_context(Preparation(one, place, out)) for one in parts[number + 1 : number + 2]]
            print(f"{part.name}: {part.words}", flush=True)
            ran.append(run_part(part, place, out, given, again=again, unready=why))
    return ran


def run_part(part: Part, place: Place, out: Path, given: Mapping[str, Any], *, again: bool, unready: str = "") -> Ran:
    kept_at = out / f"{part.name}.json"
    kept = {} if again else _passed_before(kept_at, part, given)
    open_checks = [one for one in part.checks if one.name not in kept]
    if not open_checks:
        return Ran(part, tuple(kept.values()), 0.0, frozenset(kept))
    began = time.monotonic()
    if unready:
        found = _unfinished([one.name for one in open_checks], unready)
    else:
        found = _run(part, [one.name for one in open_checks], place, out)
    known = kept | {one.name: one for one in found}
    names = [*(one.name for one in part.checks), END]
    ran = Ran(part, tuple(known[name] for name in names if name in known), time.monotonic() - began, frozenset(kept))
    _written(kept_at, {**given, "seconds": ran.seconds, "results": [asdict(one) for one in ran.results]})
    return ran


def _passed_before(kept: Path, part: Part, given: Mapping[str, Any]) -> dict[str, Result]:
    """What passed under the same conditions, by name. Nothing, where the process of all that did not end well."""
    try:
        record = json.loads(kept.read_text())
        results = [Result(**one) for one in record["results"]]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        return {}
    names = {one.name for one in part.checks}
    passed = {one.name: one for one in results if one.became == "passed" and one.name in names}
    is_same = all(record.get(key) == value for key, value in given.items())
    ended_badly = len(passed) == len(names) and any(one.name == END for one in results)
    return passed if is_same and not ended_badly else {}


def _run(part: Part, names: Sequence[str], place: Place, out: Path) -> list[Result]:
    lines, log = out / f"{part.name}.jsonl", out / f"{part.name}.log"
    lines.unlink(missing_ok=True)
    asked = _written(out / f"{part.name}.place.json", place_record(place))
    with log.open("wb") as errors:
        process = _started(command_of(part.name, str(asked), str(lines), *names), errors)
        try:
            status = process.wait(part.limit_s)
            why = f"its process ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"the part's {part.limit_s:.0f} s were over: typed again, it goes on here"
        finally:
            _end(process)
    results = list(_read_lines(lines))
    left = names[len(results) :]
    if left:
        return results + _unfinished(left, f"{_end_of(log)}\n{why or 'its process said no more'}".strip())
    return [*results, Result(END, "failed", f"{_end_of(log)}\n{why}".strip())] if why else results


def _read_lines(lines: Path) -> list[Result]:
    """Those that are whole: the last one may have been cut."""
    found = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        with contextlib.suppress(ValueError, TypeError):
            found.append(Result(**json.loads(line)))
    return found


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
