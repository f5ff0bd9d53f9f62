"""The layout of GSPO_DATA_DIR, which holds everything that an installation keeps beside Redis.

The rule: no other module builds a path below the data directory. It opens and creates nothing. ``venvs`` and ``redis``
go as a whole to the modules that fill them, which name their content.

    jobs/ID/   environments/NAME/   keys/   audit.jsonl   secrets/ROLE/   engine.port
    logs/   venvs/   redis/   models/   demo/
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from services.files.job_dir import JobsDir

# Left out of backups: rebuilt from the rest, installed again, or secret.
NOT_SAVED = frozenset({"redis", "venvs", "logs", "secrets"})

UPLOADS = ".uploads"
_RECORD = re.compile(r"(\d{8})\.json")
_REPORT = re.compile(r"\d{8}\.report-(\d{4})\.json")


@dataclass(frozen=True, slots=True)
class DataDir:
    path: Path

    @property
    def jobs(self) -> JobsDir:
        return JobsDir(self.path / "jobs")

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
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def venvs(self) -> Path:
        return self.path / "venvs"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def redis_log(self) -> Path:
        return self.redis / "server.log"

    @property
    def demo(self) -> Path:
        """A run of the demonstration: a data directory of its own."""
        return self.path / "demo"

    @property
    def engine_port(self) -> Path:
        """Holds the port of the engine that was started here, for the next start."""
        return self.path / "engine.port"

    def model(self, name: str) -> Path:
        """A model that was made here."""
        return self.path / "models" / name

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
        """In order; also of what is no environment."""
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

    def secret(self, role: str, name: str) -> Path:
        return self.path / role / name
