"""The records of a job that outlive Redis: what was accepted, its states, its environments, its published versions.

The rule: each is a JSON object with sorted keys, written once; anything else is damage. Records of schema 1 carry no
number; others say theirs under ``schema``, and what a later release wrote is refused by name. Only descriptions of
environments have schema 2: the parameters of their tools may use more of JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from gspo_core.json_value import JSON
from gspo_core.spec import JobSpec

SCHEMA = 2


class DamagedRecord(Exception):
    """A record was changed since it was written, or a later release wrote it."""


class RecordConflict(Exception):
    """The name exists with another content."""


@dataclass(frozen=True, slots=True)
class AcceptedJob:
    spec: str
    """The specification as JSON text."""
    digest: str
    created_at: str
    idempotency: str | None = None
    """Digest of the client's key."""
    owner: str = ""

    @property
    def job_spec(self) -> JobSpec:
        """Raises pydantic.ValidationError for a specification that only another release can read."""
        return JobSpec.model_validate_json(self.spec)


@dataclass(frozen=True, slots=True)
class VersionRecord:
    version: int
    step: int
    manifest: str
    """As the row of the version table (``manifests.encode_row``)."""


def encode_record(record: Mapping[str, JSON] | AcceptedJob | VersionRecord, schema: int = 1) -> bytes:
    fields = asdict(record) if isinstance(record, AcceptedJob | VersionRecord) else dict(record)
    if schema > 1:
        fields["schema"] = schema
    return json.dumps(fields, sort_keys=True, allow_nan=False).encode()


def decode_record(data: bytes, schema: int = SCHEMA) -> dict[str, JSON]:
    """``schema``: the newest that the caller can read. Raises DamagedRecord."""
    try:
        record = json.loads(data)
    except ValueError as error:
        raise DamagedRecord(str(error)) from error
    if not isinstance(record, dict):
        raise DamagedRecord("holds no record")
    number = record.pop("schema", 1)
    if number not in range(1, schema + 1):
        raise DamagedRecord(
            f"has the schema {number!r}, this release reads up to {schema}: go on with the release that wrote it"
        )
    return record


def decode_metrics(lines: Iterable[bytes]) -> Iterator[dict[str, JSON]]:
    """The objects of a file of metrics, without lines that a crash cut off."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
