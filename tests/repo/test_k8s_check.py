"""What the check of a cluster waits for, without a cluster: `tests/e2e/k8s_check.py`."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.e2e import k8s_check
from tests.e2e.compose_check import CheckFailed

NIGHT = "17 3 * * *"
HOURLY = re.compile(r"\d{1,2} \* \* \* \*")


class FakeCluster:
    """One CronJob; ``begins``: jobs that are there as soon as its schedule is another."""

    def __init__(self, *begins: str) -> None:
        self.schedules = [NIGHT]
        self._begins = begins

    def kubectl(self, *words: str, **_: Any) -> str:
        match words:
            case ("get", "cronjob", "backup", *_):
                return json.dumps({"spec": {"schedule": self.schedules[-1]}})
            case ("get", "jobs", *_):
                begun = self._begins if len(self.schedules) > 1 else ()
                return json.dumps({"items": [job("restore-1"), job("backup-old", "backup"), *map(of_backup, begun)]})
            case ("patch", "cronjob", "backup", "--type=merge", "--patch", patch):
                self.schedules.append(json.loads(patch)["spec"]["schedule"])
                return ""
        raise AssertionError(words)


def job(name: str, *owners: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "ownerReferences": [{"kind": "CronJob", "name": one} for one in owners]}}


def of_backup(name: str) -> dict[str, Any]:
    return job(name, "backup")


def test_the_job_that_the_schedule_begins_is_told_from_others_and_the_schedule_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster("backup-1764284220")
    monkeypatch.setattr(k8s_check, "kubectl", cluster.kubectl)
    assert k8s_check.scheduled("backup") == "backup-1764284220"
    own, soon, again = cluster.schedules
    assert (own, again) == (NIGHT, NIGHT)
    assert HOURLY.fullmatch(soon)


def test_a_schedule_that_begins_nothing_is_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    monkeypatch.setattr(k8s_check, "kubectl", cluster.kubectl)
    with pytest.raises(CheckFailed, match="a job of backup at"):
        k8s_check.scheduled("backup", most_s=0)
    assert cluster.schedules[-1] == NIGHT


def test_the_minute_that_is_waited_for_begins_in_half_a_minute_to_a_minute_and_a_half() -> None:
    hour = time.mktime((2026, 11, 27, 23, 0, 0, 0, 0, -1))
    for second in range(3600):
        assert 30 < (k8s_check.coming_minute(hour + second) * 60 - second) % 3600 <= 90
