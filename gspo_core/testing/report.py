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

    def __str__(self) -> str:
        return f"{_MARKS[self.status]} {self.id:<12} {self.message}"

    @classmethod
    def from_json(cls, given: CheckRecord) -> Check:
        return cls(given["id"], Status(given["status"]), given["message"], given["data"])

    def to_json(self) -> CheckRecord:
        return {"id": self.id, "status": str(self.status), "message": self.message, "data": dict(self.data)}


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
        return cls(given["name"], [Check.from_json(one) for one in given["checks"]])

    def to_json(self) -> JudgedRecord:
        return {"name": self.name, "ok": self.ok, "checks": [check.to_json() for check in self.checks]}

    @property
    def verdict(self) -> str:
        return f"{self.name}: {'sound' if self.ok else 'refused'}"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), "", self.verdict])
