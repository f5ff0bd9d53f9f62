"""How processes ended: which ends were in order, and of the others what befell them meanwhile and what they said last.

The rule kept here: who is asked to leave leaves in order, unless what it needs for that was away for most of its time.
What is told is bounded, and what matters most comes last: of a long output often only the end is kept.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.chaos.absences import REDIS, seconds_away
from tests.chaos.evidence import Evidence
from tests.chaos.processes import End

# Of the time from the wish to the end: so much of it away, and nothing in order can be asked for.
AWAY_SHARE = 0.5
MAX_TOLD = 3
MAX_LINES = 40
MAX_LINE_CHARS = 200
MAX_MEANWHILE = 8
_TAIL_BYTES = 1 << 17
"""Of a log: more than the lines that are told."""
_NOT_TOLD = {"service", "worker", "timestamp", "event", "level", "exception"}
_HEARD = '"event": "signal"'


def wrong(evidence: Evidence) -> list[End]:
    return [end for end in evidence.ends if not _is_in_order(end, evidence)]


def may_be_late(end: End) -> bool:
    """Of an end that was not in order: whether it was asked for and only came late, or cut something short for it."""
    return end.asked is not None and (end.is_late or end.status in (1, -signal.SIGTERM))


def _is_in_order(end: End, evidence: Evidence) -> bool:
    if end.asked is None or end.is_late:
        return False
    if end.status == -signal.SIGTERM:  # born in this moment: it had nothing yet, and no ears for signals
        return _HEARD not in _tail(evidence.work, end)
    return end.status in (0, -signal.SIGKILL) or (end.status == 1 and _was_kept_from_it(end, evidence))


def _was_kept_from_it(end: End, evidence: Evidence) -> bool:
    assert end.asked is not None
    away_s = seconds_away(evidence.absences, (end.name, REDIS), end.asked, end.at)
    return away_s >= AWAY_SHARE * (end.at - end.asked)


def described(end: End) -> str:
    if end.is_late:
        return "did not leave when it was asked to"
    return f"ended by itself with status {end.status}" if end.asked is None else f"left with status {end.status}"


def told(evidence: Evidence) -> Iterator[str]:
    """Lines for the output, about those whose end was not in order."""
    ends = wrong(evidence)[:MAX_TOLD]
    for end in ends:
        yield f"the log of {end.name}/{end.pid}, in seconds from {'its end' if end.asked is None else 'the wish'}:"
        yield from (f"  {line}" for line in last_words(evidence.work, end))
    for end in ends:
        yield f"{end.name}/{end.pid} {described(end)}: {_explained(end, evidence)}"


def _explained(end: End, evidence: Evidence) -> str:
    lived_s = end.at - end.born
    if end.asked is None:
        return f"it had lived for {lived_s:.1f} s; before: {_faults(end, end.at - 10.0, evidence)}"
    away_s = seconds_away(evidence.absences, (end.name, REDIS), end.asked, end.at)
    return (
        f"asked {end.asked - end.born:.1f} s after its birth, it took {end.at - end.asked:.1f} s, of which it or Redis "
        f"was away for {away_s:.1f} s; meanwhile: {_faults(end, end.asked, evidence)}"
    )


def _faults(end: End, since: float, evidence: Evidence) -> str:
    """That it may have noticed, the last ones."""
    zero = end.at if end.asked is None else end.asked
    found = [
        f"{fault['at'] - zero:+.1f} {fault['kind']}" + (f" ({fault['detail']})" if fault.get("detail") else "")
        for fault in evidence.faults
        if since <= fault["at"] <= end.at and fault.get("target") in (end.name, REDIS, "disk", "agents")
    ]
    return ", ".join(found[-MAX_MEANWHILE:]) or "no fault"


def last_words(work: Path, end: End) -> list[str]:
    zero = end.at if end.asked is None else end.asked
    lines = [line for text in _tail(work, end).splitlines() for line in _shortened(text, zero)]
    return lines[-MAX_LINES:]


def warnings(work: Path) -> Iterator[str]:
    """The last ones of everybody who was there at the end, where nobody in particular is to blame."""
    newest = {path.stem.rpartition("-")[0]: path for path in sorted(_logs(work), key=lambda one: one.stat().st_mtime)}
    for name, path in sorted(newest.items()):
        lines = [line for line in _end_of(path).splitlines() if not _is_calm(line)]
        yield from (f"{name}: {short}" for line in lines[-2:] for short in _shortened(line, 0.0)[-2:])


def _is_calm(line: str) -> bool:
    record = _record(line)
    return record is not None and record.get("level") in ("debug", "info")


def _logs(work: Path) -> list[Path]:
    return list((work / "logs").glob("*-*.log"))


def _tail(work: Path, end: End) -> str:
    path = work / "logs" / f"{end.name}-{end.pid}.log"
    return _end_of(path) if path.exists() else ""


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record and "timestamp" in record else None


def _shortened(line: str, zero: float) -> list[str]:
    """A line of a log as it is shown; one with a traceback becomes several."""
    record = _record(line)
    if record is None:
        return [line[:MAX_LINE_CHARS]]
    at = datetime.fromisoformat(record["timestamp"]).timestamp() - zero if zero else 0.0
    more = " ".join(f"{name}={value}" for name, value in record.items() if name not in _NOT_TOLD)
    shown = f"{at:+.2f} {record['event']} {more}" if zero else f"{record['timestamp'][11:19]} {record['event']} {more}"
    traceback = str(record.get("exception") or "").splitlines()
    return [one[:MAX_LINE_CHARS] for one in (shown, *traceback)]
