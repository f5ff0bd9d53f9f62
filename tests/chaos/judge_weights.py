"""Published weights, bit by bit: what lies on the disk, what an engine was given, and what was written down of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from gspo_core.versions import EngineLabel
from tests.chaos.evidence import Evidence, JobEvidence, Version

MANIFEST = "manifest.json"


def weights_on_disk_are_those_published(job: JobEvidence) -> Iterator[str]:
    """Of every epoch, also of those that died."""
    for version in job.versions.values():
        folder = job.directory / "weights" / f"v{version.number}"
        if folder.is_dir():
            yield from _differences(version, digests(folder), f"the disk holds of version {version.number}")
            if missing := sorted(version.files.keys() - digests(folder).keys()):
                yield f"version {version.number} lacks {missing} on the disk"


def engines_were_given_what_was_published(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """An engine that loads may find files removed, never other ones."""
    for load in evidence.loads:
        label = EngineLabel.parse_or_none(load["label"] or "")
        if label is None or label.job != job.id:
            continue
        version = job.versions.get(label.version)
        if version is None:
            yield f"an engine was told to load version {label.version}, which was never published"
        elif label.epoch != version.place[0]:
            yield f"an engine was told that version {label.version} is of epoch {label.epoch}"
        else:
            yield from _differences(version, load["files"], f"an engine loaded as version {label.version}")


def _differences(version: Version, found: dict[str, str], where: str) -> Iterator[str]:
    for name, digest in found.items():
        if name != MANIFEST and version.files.get(name) != digest:
            yield f"{where} another {name} than was published"


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
