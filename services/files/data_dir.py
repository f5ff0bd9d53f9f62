"""The layout of GSPO_DATA_DIR, which holds everything that an installation keeps beside Redis.

The rule: no other module builds a path below the data directory. It opens and creates nothing. ``venvs`` and ``redis``
go as a whole to the modules that fill them, which name their content.

    jobs/ID/   environments/NAME/   keys/   audit.jsonl   secrets/ROLE/   PROCESS.port   installation.json   served.json
    logs/   venvs/   redis/   models/   demo/   hub/models/   hub/datasets/
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from gspo_core.log import layout
from services.files.job_dir import JobsDir

# Version of the names below the data directory and below a job's. A backup carries it.
LAYOUT = 1
# Left out of backups: rebuilt from the rest, installed again, or secret.
NOT_SAVED = frozenset({"redis", "venvs", "logs", "secrets", "served.json"})

SHARED = frozenset({"environments", "models", "hub"})
"""What jobs need beside their own."""

UPLOADS = ".uploads"
FETCHED = "fetched.json"
"""Says in a directory what was fetched there from the hub."""
_NAME = re.compile(
    r"(?P<owner>[A-Za-z0-9][\w.-]{0,95})/(?P<repository>[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RECORD = re.compile(r"(\d{8})\.json")
_REPORT = re.compile(r"\d{8}\.report-(\d{4})\.json")


@dataclass(frozen=True, slots=True)
class DataDir:
    path: Path

    @property
    def jobs(self) -> JobsDir:
        return JobsDir(self.path / layout.JOBS)

    @property
    def environments(self) -> EnvironmentsDir:
        return EnvironmentsDir(self.path / "environments")

    @property
    def keys(self) -> KeysDir:
        return KeysDir(self.path / "keys")

    @property
    def audit(self) -> Path:
        return self.path / "audit.jsonl"

    @property
    def installation(self) -> Path:
        """Which installation it belongs to."""
        return self.path / "installation.json"

    @property
    def served(self) -> Path:
        """Which Redis serves it at the moment."""
        return self.path / "served.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def venvs(self) -> Path:
        return self.path / "venvs"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def secrets(self) -> SecretsDir:
        """Where launchers without a secret store of their own keep them."""
        return SecretsDir(self.path / "secrets")

    def log_of(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def redis_log(self) -> Path:
        return self.redis / "server.log"

    @property
    def demo(self) -> Path:
        """A run of the demonstration: a data directory of its own."""
        return self.path / "demo"

    def port_of(self, process: str, index: int = 0) -> Path:
        """Holds the port of a process that was started here, for the next start: others know its address."""
        return self.path / (f"{process}-{index}.port" if index else f"{process}.port")

    def model(self, name: str) -> Path:
        """A model that was made here."""
        return self.path / "models" / name

    @property
    def hub(self) -> HubDir:
        """What was fetched from the hub."""
        return HubDir(self.path / "hub")

    def named(self, path: str) -> Path:
        """What answers of the API call so, such as the path of an export."""
        return self.path / path

    def witness(self) -> Path:
        """A fresh name for a file that proves that several machines see the same directory."""
        return self.path / f".ranks-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class EnvironmentsDir:
    """Registered environments.

    NAME/00000001.json   NAME/00000001.report-0001.json   NAME/00000001.removed   .uploads/DIGEST/...
    """

    path: Path

    def names(self) -> list[str]:
        """In order; entries that are no environment included."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def environment(self, name: str) -> Path:
        return self.path / name

    def record(self, name: str, version: int) -> Path:
        return self.environment(name) / f"{version:08d}.json"

    def removed(self, name: str, version: int) -> Path:
        return self.environment(name) / f"{version:08d}.removed"

    def report(self, name: str, version: int, number: int) -> Path:
        return self.environment(name) / f"{version:08d}.report-{number:04d}.json"

    def upload(self, digest: str) -> Path:
        return self.path / UPLOADS / digest

    def versions(self, name: str) -> list[int]:
        """In order."""
        folder = self.environment(name)
        found = (_RECORD.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
        return sorted(int(match[1]) for match in found if match)

    def reports(self, name: str, version: int) -> list[int]:
        """In order."""
        paths = self.environment(name).glob(f"{version:08d}.report-*.json")
        return sorted(int(match[1]) for path in paths if (match := _REPORT.fullmatch(path.name)))


@dataclass(frozen=True, slots=True)
class KeysDir:
    """Keys of the API: ID.json, and ID.revoked beside it."""

    path: Path

    def record(self, key_id: str) -> Path:
        return self.path / f"{key_id}.json"

    def revoked(self, key_id: str) -> Path:
        return self.path / f"{key_id}.revoked"

    def records(self) -> list[Path]:
        return list(self.path.glob("*.json"))

    def revoked_ids(self) -> set[str]:
        return {path.stem for path in self.path.glob("*.revoked")}


@dataclass(frozen=True, slots=True)
class SecretsDir:
    """The secrets of an installation: a directory for each kind of process, with files named like settings."""

    path: Path

    def of(self, role: str) -> Path:
        return self.path / role

    def secret(self, role: str, name: str) -> Path:
        return self.of(role) / name


class HubKind(StrEnum):
    MODEL = "model"
    DATASET = "dataset"


@dataclass(frozen=True, slots=True)
class HubName:
    """``owner/repository``, with ``@revision`` where one is asked for: a branch, a tag or a commit."""

    owner: str
    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for a text that names no repository: a path, or a name without an owner."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(found["owner"], found["repository"], found["revision"])

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repository}"

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubDir:
    """What was fetched, by kind: ``models/OWNER--REPOSITORY@COMMIT/`` and ``datasets/...``."""

    path: Path

    def place(self, kind: HubKind) -> Path:
        return self.path / f"{kind}s"

    def directory(self, kind: HubKind, name: HubName, commit: str) -> Path:
        return self.place(kind) / f"{name.owner}--{name.repository}@{commit}"

    def fetched(self, kind: HubKind, name: HubName) -> Path | None:
        """The directory of the commit that ``name`` asks for, or of the one that was fetched last."""
        if name.revision is not None and not _COMMIT.fullmatch(name.revision):
            return None  # a branch or a tag moves: only the hub knows where it stands
        found = self.place(kind).glob(f"{name.owner}--{name.repository}@{name.revision or '*'}")
        whole = [one for one in found if _COMMIT.fullmatch(one.name.rpartition("@")[2]) and (one / FETCHED).is_file()]
        return max(whole, key=lambda one: (one / FETCHED).stat().st_mtime_ns, default=None)


def commit_of(directory: Path) -> str | None:
    """The commit that a fetched directory holds; None for any other directory."""
    commit = directory.name.rpartition("@")[2]
    return commit if _COMMIT.fullmatch(commit) else None
