"""Registered environments: names, immutable versions, uploads, and the reports of their examinations.

The rule: a version is a write-once file and never changes; the same content registered twice is the same version. It
runs nothing and imports nothing that it keeps; ``sites`` turns a version into what a host loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

from gspo_core.json_value import JSON
from gspo_core.log.records import decode_record
from services.files.data_dir import EnvironmentsDir
from services.files.durable import make_directory, write_once

# Schema of registrations and reports. 2: an agent plays it; without one a record names none, as in earlier releases.
SCHEMA = 2
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_REFERENCE = re.compile(rf"({NAME.pattern})(?:@([1-9][0-9]{{0,7}}))?")
MAX_REPORTS = 50


class EnvironmentNotFound(LookupError):
    """The environment does not exist, or was removed."""

    def __init__(self, reference: str) -> None:
        super().__init__(f"no environment {reference[:80]!r} is registered")


class NameTaken(Exception):
    """The name belongs to another owner."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One version of an environment."""

    name: str
    version: int
    owner: str
    created_at: str
    source: Mapping[str, JSON]
    """As it was registered, without the upload."""
    ref: str
    """What a host loads: `package.module:Class`, or a path below the upload."""
    config: Mapping[str, JSON] = field(default_factory=dict)
    upload: str | None = None
    """The digest of the upload."""
    is_remote: bool = False
    """It reaches a URL that a user named: its host may connect to allowed addresses only."""
    digest: str = ""
    agent: Mapping[str, JSON] | None = None
    """How its agent is started, as a job has it; None where a job says that itself, or where it has none."""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"


class ExaminationFinding(TypedDict):
    """One finding of an examination, as `gspo_core.testing.report` writes it."""

    id: str
    status: str
    message: str
    data: JSON


class ExaminationReport(TypedDict):
    """Every finding of an examination."""

    name: str
    ok: bool
    checks: list[ExaminationFinding]


def parse_reference(text: str) -> tuple[str, int | None] | None:
    """Name and version of `name@3` or `name`; None for an import string."""
    match = _REFERENCE.fullmatch(text)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def digest_of(one: Registration) -> str:
    """Equal for registrations with the same content."""
    content = [one.ref, one.config, one.upload, one.source, *([] if one.agent is None else [one.agent])]
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class EnvironmentRegistry:
    """The environments in a directory. Blocking: call it in a thread."""

    def __init__(self, directory: EnvironmentsDir) -> None:
        self._directory = directory

    @property
    def path(self) -> Path:
        return self._directory.path

    def add(self, wanted: Registration) -> tuple[Registration, bool]:
        """The version that holds this content, and whether it is new; ``wanted.version`` and ``digest`` are ignored.
        Raises NameTaken."""
        digest = digest_of(wanted)
        while True:
            versions = self._versions(wanted.name)
            held = [self._read(wanted.name, version) for version in versions]
            _require_owner(held, wanted.owner)
            for one in reversed(held):
                if one.digest == digest and not self._is_removed(one):
                    return one, False
            number = max(versions, default=0) + 1
            record = Registration(**{**asdict(wanted), "version": number, "digest": digest})
            make_directory(self._directory.environment(wanted.name))
            # Another process may have taken the number: then look at its content first.
            with contextlib.suppress(FileExistsError):
                write_once(self._directory.record(wanted.name, number), [_bytes_of(record)])
                return record, True

    def require_name(self, name: str, owner: str) -> None:
        """Raises NameTaken: to be called before anything is stored under the name."""
        _require_owner([self._read(name, version) for version in self._versions(name)[:1]], owner)

    def get(self, reference: str) -> Registration:
        """The version that `name@version` names, or the newest of `name`. Raises EnvironmentNotFound."""
        parsed = parse_reference(reference)
        if parsed is None:
            raise EnvironmentNotFound(reference)
        name, version = parsed
        versions = [version] if version is not None else self._versions(name)[::-1]
        for number in versions:
            with contextlib.suppress(FileNotFoundError):
                found = self._read(name, number)
                if not self._is_removed(found):
                    return found
        raise EnvironmentNotFound(reference)

    def all(self) -> list[Registration]:
        """By name, the versions of each in order."""
        names = [name for name in self._directory.names() if NAME.fullmatch(name)]
        held = [self._read(name, version) for name in names for version in self._versions(name)]
        return [one for one in held if not self._is_removed(one)]

    def remove(self, one: Registration) -> None:
        """Its number is never used again."""
        with contextlib.suppress(FileExistsError):
            write_once(self._directory.removed(one.name, one.version), [b"{}"])

    def report(self, one: Registration) -> ExaminationReport | None:
        """The report of the newest examination; None before the first."""
        numbers = self._reports(one)
        if not numbers:
            return None
        return cast(ExaminationReport, decode_record(self._report_path(one, numbers[-1]).read_bytes(), SCHEMA))

    def add_report(self, one: Registration, report: ExaminationReport) -> None:
        number = max(self._reports(one), default=0) + 1
        if number <= MAX_REPORTS:
            with contextlib.suppress(FileExistsError):  # another worker examined it at the same time
                write_once(self._report_path(one, number), [json.dumps(dict(report)).encode()])

    def upload_dir(self, digest: str) -> Path:
        return self._directory.upload(digest)

    def _versions(self, name: str) -> list[int]:
        return self._directory.versions(name)

    def _read(self, name: str, version: int) -> Registration:
        record: dict[str, Any] = decode_record(self._directory.record(name, version).read_bytes(), SCHEMA)
        return Registration(**record)

    def _is_removed(self, one: Registration) -> bool:
        return self._directory.removed(one.name, one.version).exists()

    def _reports(self, one: Registration) -> Sequence[int]:
        return self._directory.reports(one.name, one.version)

    def _report_path(self, one: Registration, number: int) -> Path:
        return self._directory.report(one.name, one.version, number)


def _bytes_of(record: Registration) -> bytes:
    fields = asdict(record)
    if record.agent is None:
        del fields["agent"]
    return json.dumps(fields if record.agent is None else {"schema": SCHEMA, **fields}).encode()


def _require_owner(held: Sequence[Registration], owner: str) -> None:
    """A name belongs to the owner of its first version."""
    if held and held[0].owner != owner:
        raise NameTaken(f"the name {held[0].name} belongs to another owner; choose a different one")
