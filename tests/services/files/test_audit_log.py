"""The audit's files: lines of many writers, set aside by size and age, removed in time, exported in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.files.audit_log import AuditLog
from services.launch import audit_log as command
from tests.patience import HANG_S

DAY_S = 86_400.0
WRITER = """
import sys
from pathlib import Path
from services.files.audit_log import AuditLog

log = AuditLog(Path(sys.argv[1]), max_bytes=2000)
for number in range(200):
    log.append('{"at": "2026-01-01T00:00:00Z", "by": "%s", "number": %d}' % (sys.argv[2], number))
"""


def line(at: str, **more: object) -> str:
    return json.dumps({"at": at, **more})


def test_many_processes_write_and_set_aside_and_no_line_is_lost_or_mixed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(3)]
    assert [writer.wait(HANG_S) for writer in writers] == [0, 0, 0]
    log = AuditLog(path)
    assert len(log.files()) > 5
    written = sorted((one["by"], one["number"]) for one in map(json.loads, log.lines()))
    assert written == [(str(by), number) for by in range(3) for number in range(200)]


def test_what_is_old_is_set_aside_and_what_is_too_old_is_removed(tmp_path: Path) -> None:
    clock = [1_767_225_600.0]  # 2026-01-01
    log = AuditLog(tmp_path / "audit.jsonl", max_age_s=30 * DAY_S, kept_s=50 * DAY_S, now=lambda: clock[0])
    log.append(line("2026-01-01T00:00:00Z"))
    clock[0] += 29 * DAY_S
    log.append(line("2026-01-30T00:00:00Z"))
    assert len(log.files()) == 1
    clock[0] += 2 * DAY_S
    log.append(line("2026-02-01T00:00:00Z"))
    assert [path.name for path in log.files()] == ["audit-20260201T000000Z.jsonl", "audit.jsonl"]
    assert [json.loads(one)["at"][:10] for one in log.lines()] == ["2026-01-01", "2026-01-30", "2026-02-01"]
    clock[0] += 60 * DAY_S
    log.append(line("2026-04-02T00:00:00Z"))
    assert [json.loads(one)["at"][:10] for one in log.lines()] == ["2026-02-01", "2026-04-02"]


def test_the_command_prints_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    changes = [{"what": "job", "name": "job_1", "old": {"optimizer.lr": 1e-6}, "new": {"optimizer.lr": 2e-6}}]
    log.append(line("2026-01-01T00:00:00Z", key="a", path="/v1/jobs/job_1", changes=changes))
    log.append("half a li")
    log.append(line("2026-01-02T00:00:00Z", key="b", path="/v1/keys", changes=[]))
    monkeypatch.setenv("GSPO_DATA_DIR", str(tmp_path))

    def printed(*arguments: str) -> list[str]:
        parser = command.argparse.ArgumentParser()
        command.add_options(parser)
        assert command.run(parser.parse_args(arguments)) == 0
        return [json.loads(one)["at"][:10] for one in capsys.readouterr().out.splitlines()]

    assert printed() == ["2026-01-01", "2026-01-02"]
    assert printed("--name", "job_1") == printed("--key", "a") == printed("--until", "2026-01-02") == ["2026-01-01"]
    assert printed("--since", "2026-01-02") == ["2026-01-02"]
