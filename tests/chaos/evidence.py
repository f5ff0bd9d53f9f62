"""What a run has left on disk, read for the oracle, and which of it counts.

The rule kept here: which logs are the history of a job is worked out anew, not asked of the code that is judged: from
the newest epoch back along the records of where each forked off.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gspo_core.spec import JobSpec
from services.files.batch_log import LoggedBatch, read_batch
from tests.chaos.absences import Absence
from tests.chaos.jobs import kinds_of
from tests.chaos.processes import End

_BATCH = re.compile(r"ep(\d+)-step(\d+)")
_EPOCH = re.compile(r"epoch(\d+)\.json")
Place = tuple[int, int]
"""(epoch, step)"""
Note = dict[str, Any]
LAST = 1 << 60
"""Beyond the last step of every epoch."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Version:
    number: int
    place: Place
    files: dict[str, str]
    """Name -> sha256."""


class JobEvidence:
    """``acts`` are what users did to it, ``hits`` what befell its records, both as they were noted."""

    def __init__(self, directory: Path, data_dir: str, acts: Sequence[Note] = (), hits: Sequence[Note] = ()) -> None:
        self.directory = directory
        self.acts, self.hits = acts, hits
        self.id = directory.name
        self.spec = JobSpec.model_validate_json(json.loads((directory / "job.json").read_text())["spec"])
        self._data_dir = data_dir
        """Where the run had it: engines name weights by their path."""

    @property
    def in_short(self) -> str:
        """What it is, and what became of it."""
        kinds = ", ".join(sorted(kinds_of(self.spec.model_dump(mode="json"))))
        befell = Counter(hit["kind"] for hit in self.hits if hit.get("job") == self.id)
        more = f"; {', '.join(f'{kind} x {count}' for kind, count in befell.items())}" if befell else ""
        became = f"{self.status.get('status')}, {len(self.lineage)} steps in {len(self.forks)} epochs"
        return f"{kinds}; {became}, {len(self.logged)} logs{more}"

    @property
    def is_given_up(self) -> bool:
        """By its user, and it is."""
        was_asked = any(act["act"] == "cancel" for act in self.acts)
        return was_asked and self.status.get("status") == "cancelled"

    @cached_property
    def status(self) -> dict[str, Any]:
        files = sorted((self.directory / "status").iterdir())
        status: dict[str, Any] = json.loads(files[-1].read_text())
        return status

    @cached_property
    def forks(self) -> dict[int, Place]:
        """Epoch -> where it went on from."""
        found = ((_EPOCH.fullmatch(entry.name), entry) for entry in (self.directory / "checkpoints").glob("*"))
        records = {int(match[1]): json.loads(entry.read_text()) for match, entry in found if match}
        return {epoch: (record["epoch"], record["step"]) for epoch, record in sorted(records.items())}

    @cached_property
    def logged(self) -> set[Place]:
        found = (_BATCH.fullmatch(entry.name) for entry in (self.directory / "batches").glob("ep*"))
        return {(int(match[1]), int(match[2])) for match in found if match}

    def reach(self, place: Place) -> dict[int, int]:
        """Of each epoch that leads to ``place``: up to which step."""
        reached = {place[0]: place[1]}
        epoch, step = place
        while epoch in self.forks and self.forks[epoch][0] < epoch and self.forks[epoch][1] > 0:
            epoch, step = self.forks[epoch][0], min(step, self.forks[epoch][1])
            reached[epoch] = step
        return reached

    @cached_property
    def reached(self) -> dict[int, int]:
        """By the newest epoch; nothing where none has begun."""
        return self.reach((max(self.forks), LAST)) if self.forks else {}

    def shared(self, place: Place) -> int:
        """The last step that the history of ``place`` has in common with what the job ended with."""
        epoch, step = place
        while epoch not in self.reached and step > 0:
            parent = self.forks.get(epoch, (0, 0))
            epoch, step = parent[0], min(step, parent[1])
        return min(step, self.reached.get(epoch, 0))

    @cached_property
    def lineage(self) -> list[Place]:
        """What was trained, in order; it may have holes, which a check finds."""
        row: list[Place] = []
        for epoch, end in self.reached.items():
            begin = self.forks[epoch][1] if epoch in self.forks else 0
            row += [place for place in self.logged if place[0] == epoch and begin < place[1] <= end]
        return sorted(row, key=lambda place: place[1])

    @cached_property
    def batches(self) -> dict[Place, LoggedBatch]:
        """Of the lineage."""
        return {place: read_batch(self.batch_path(place)) for place in self.lineage}

    def batch_path(self, place: Place) -> Path:
        return self.directory / "batches" / f"ep{place[0]:06d}-step{place[1]:06d}"

    @cached_property
    def versions(self) -> dict[int, Version]:
        found = {}
        for path in sorted((self.directory / "versions").glob("*.json")):
            record = json.loads(path.read_text())
            manifest = json.loads(record["manifest"])
            files = {file["path"]: file["sha256"] for file in manifest["files"]}
            assert (manifest["version"], int(path.stem)) == (record["version"], record["version"]), path
            found[record["version"]] = Version(record["version"], (manifest["epoch"], manifest["step"]), files)
        return found

    def weights_name(self, version: int) -> str:
        """What an engine that was told to load it calls it."""
        return f"{self._data_dir}/jobs/{self.id}/weights/v{version}"

    @cached_property
    def newest_checkpoint(self) -> Path | None:
        """Of the lineage."""
        found = (_BATCH.fullmatch(entry.name) for entry in (self.directory / "checkpoints").glob("*"))
        places = {(int(match[1]), int(match[2])): match[0] for match in found if match}
        living = [place for place in places if place[1] <= self.reached.get(place[0], -1)]
        return self.directory / "checkpoints" / places[max(living)] if living else None


class Evidence:
    def __init__(self, work: Path) -> None:
        self.work = work
        self.run = json.loads((work / "run.json").read_text())
        self.end = json.loads((work / "end.json").read_text()) if (work / "end.json").exists() else None
        self.data = work / "kept" if (work / "kept" / "jobs").is_dir() else work / "data"
        self.submissions = lines(work / "submissions.jsonl")
        self.samples = lines(work / "samples.jsonl")
        self.faults = lines(work / "faults.jsonl")
        self.acts = lines(work / "acts.jsonl")
        self.happened = lines(work / "happened.jsonl")
        self.loads = lines(work / "loads.jsonl")

    @property
    def ends(self) -> list[End]:
        """Of processes."""
        return [End(**end) for end in (self.end or {}).get("ends", ())]

    @property
    def absences(self) -> list[Absence]:
        return [Absence(**absence) for absence in (self.end or {}).get("absences", ())]

    @cached_property
    def jobs(self) -> list[JobEvidence]:
        directories = sorted(path for path in (self.data / "jobs").iterdir() if (path / "job.json").exists())
        return [
            JobEvidence(
                path,
                self.run["data_dir"],
                [act for act in self.acts if act["job"] == path.name],
                [hit for hit in (*self.faults, *self.happened) if path.name in (hit.get("job"), *hit.get("jobs", ()))],
            )
            for path in directories
        ]
