"""``gspo audit-log``: what was changed over the API, from the files of an installation, as lines of JSON.

Rule: it only reads, and needs nothing that runs. Files that were set aside come first, so the lines are in order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_core.cli.command import CommandError
from services.files.audit_log import AuditLog
from services.files.data_dir import DataDir


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", help="of which installation (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument("--since", help="a date or time, such as 2026-01-31 or 2026-01-31T12:00:00Z")
    parser.add_argument("--until", help="the same; lines at or after it are left out")
    parser.add_argument("--key", help="of this key alone, by its id")
    parser.add_argument("--name", help="of this job, key or environment alone")


def run(arguments: argparse.Namespace) -> int:
    root = Path(arguments.data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    since, until = _moment(arguments.since, "--since"), _moment(arguments.until, "--until")
    num_unreadable = 0
    for line in AuditLog(DataDir(root).audit).lines():
        try:
            record: dict[str, Any] = json.loads(line)
            at = datetime.fromisoformat(record["at"])
        except (ValueError, KeyError, TypeError):
            num_unreadable += 1
            continue
        is_in_time = (since is None or at >= since) and (until is None or at < until)
        if is_in_time and arguments.key in (None, record.get("key")) and _is_of(record, arguments.name):
            print(line)
    if num_unreadable:
        print(f"gspo audit-log: {num_unreadable} lines could not be read", file=sys.stderr)
    return 0


def _is_of(record: Mapping[str, Any], name: str | None) -> bool:
    names = {one.get("name") for one in record.get("changes") or ()}
    return name is None or name in names or name in str(record.get("path", "")).split("/")


def _moment(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"{option}: {text!r} is no date or time, such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
