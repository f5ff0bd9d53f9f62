"""Parts one after the other, each bounded in time, and what became of each kept, so that a run can be gone on with.

What passed before is not run again while nothing has changed: not the code, nor the device, nor the size.
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

from benchmarks.gpu.check import Place, Result
from benchmarks.gpu.parts import Part

ROOT = Path(__file__).parents[2]
CODE = ("gspo_core", "services", "environments", "examples", "benchmarks/gpu")


@dataclass(frozen=True)
class Ran:
    """What became of a part."""

    part: Part
    results: tuple[Result, ...]
    seconds: float
    is_kept: bool = False
    """From an earlier run."""


def code_digest() -> str:
    """Of what is tried, where git may not be."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
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
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.part", *words]


def run_part(part: Part, place: Place, out: Path, given: Mapping[str, Any], *, again: bool) -> Ran:
    kept = out / f"{part.name}.json"
    if not again and (found := _read(kept, part, given)) is not None:
        return found
    began = time.monotonic()
    results = _run(part, place, out)
    ran = Ran(part, tuple(results), time.monotonic() - began)
    record = {**given, "seconds": ran.seconds, "results": [asdict(one) for one in ran.results]}
    kept.write_text(json.dumps(record, indent=2) + "\n")
    return ran


def _read(kept: Path, part: Part, given: Mapping[str, Any]) -> Ran | None:
    """What passed before under the same conditions."""
    if not kept.exists():
        return None
    record = json.loads(kept.read_text())
    results = tuple(Result(**one) for one in record["results"])
    is_same = all(record.get(key) == value for key, value in given.items())
    if not is_same or any(one.became == "failed" for one in results):
        return None
    return Ran(part, results, record["seconds"], is_kept=True)


def _run(part: Part, place: Place, out: Path) -> list[Result]:
    lines, asked, log = out / f"{part.name}.jsonl", out / f"{part.name}.place.json", out / f"{part.name}.log"
    lines.unlink(missing_ok=True)
    asked.write_text(json.dumps(asdict(place) | {"folder": str(place.folder), "trl": place.trl and str(place.trl)}))
    command = command_of(part.name, str(asked), str(lines))
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True)
        try:
            why = f"its process ended with {process.wait(part.limit_s)}"
        except subprocess.TimeoutExpired:
            why = f"the part's {part.limit_s:.0f} s were over"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = lines.read_text() if lines.exists() else ""
    results = [Result(**json.loads(line)) for line in text.splitlines()]
    return results + _unfinished(part, results, why, log)


def _unfinished(part: Part, results: Sequence[Result], why: str, log: Path) -> list[Result]:
    """The check that was at work, and those behind it."""
    left = part.checks[len(results) :]
    if not left:
        return []
    words = log.read_text(errors="replace").strip()[-2000:]
    at_work = Result(left[0].name, "failed", f"{why}\n{words}".strip())
    return [at_work, *(Result(one.name, "did not run", f"{left[0].name} took the part along") for one in left[1:])]
