"""The report of a validation: one typed finding per check, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gspo_core.environment_records import CheckRecord, JudgedRecord, Measured, ReportRecord


class Status(StrEnum):
    PASS = "pass"  # noqa: S105 - no password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


_MARKS = {Status.PASS: "✓", Status.WARN: "!", Status.FAIL: "✗", Status.SKIP: "·"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    id: str
    status: Status
    message: str
    data: Mapping[str, Measured] = field(default_factory=dict)


@dataclass
class EnvironmentReport:
    """All findings about one environment. It is refused if one of them is ``fail``."""

    name: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.status is not Status.FAIL for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status is Status.FAIL]

    @classmethod
    def from_json(cls, given: ReportRecord) -> EnvironmentReport:
        checks = [Check(one["id"], Status(one["status"]), one["message"], one["data"]) for one in given["checks"]]
        return cls(given["name"], checks)

    def to_json(self) -> JudgedRecord:
        checks: list[CheckRecord] = [
            {"id": check.id, "status": str(check.status), "message": check.message, "data": dict(check.data)}
            for check in self.checks
        ]
        return {"name": self.name, "ok": self.ok, "checks": checks}

    def __str__(self) -> str:
        lines = [f"{_MARKS[check.status]} {check.id:<12} {check.message}" for check in self.checks]
        return "\n".join([*lines, "", f"{self.name}: {'sound' if self.ok else 'refused'}"])
