"""The gate: `python3 -m tests.gate` runs what a change must pass, each phase timed; the last lines say what happened.

Set-up, checks beside the demo, tests, chaos. A later phase runs although an earlier one failed, since what is wrong is
best known at once; without a set-up there is nothing to run. It is started before anything is installed, and imports
nothing that is.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.gate import chaos, flakes, skips
from tests.gate.confirm import Verdict, in_fresh_interpreters, judge
from tests.gate.ends import Ends
from tests.gate.machine import Machine
from tests.gate.phases import TOO_LONG, Done, Phase, end_with_us, run, together

ROOT = Path(__file__).parents[2]
LOGS = Path(".make") / "gate"
RECORD = LOGS / "tests.jsonl"
SETUP = Phase("setup", ["make", "-j", "3", "setup", "test-data", "chaos-ready"], 1200)
CHECKS = Phase("checks", ["make", "check"], 900)
TESTS = Phase("tests", ["make", "--no-print-directory", "suite", f"RECORD={RECORD}"], 3300)
DEMO = Phase("demo", ["make", "demo", "DEMO_FLAGS=--expect-gain 40"], 900)
MOST_LINES = 30
MOST_WORDS = 6


def main() -> int:
    end_with_us()
    os.chdir(ROOT)
    begun, machine, known = time.monotonic(), Machine(), flakes.known(flakes.LIST.read_text())
    done = [run(SETUP, LOGS)]
    verdicts: list[Verdict] = []
    ends, first_try = Ends([]), ""
    if done[0].is_ok:
        checks, demo = together([CHECKS, DEMO], LOGS)  # the demo's model is made on one core
        RECORD.unlink(missing_ok=True)
        done += [checks, run(TESTS, LOGS), demo]
        ends = Ends.read(RECORD)
        verdicts = judge(ends.failures(), in_fresh_interpreters(LOGS), known, date.today())
        of_chaos, first_try = chaos.played(LOGS)
        done.append(of_chaos)
    red = [one for one in done if not is_excused(one, ends, verdicts)]
    seconds = time.monotonic() - begun
    lines = told(machine.told(), done, red, ends, verdicts)
    lines += [f"FLAKE   chaos: {first_try}"] if first_try else []
    lines.append(f"VERDICT {'red: ' + ', '.join(one.phase.name for one in red) if red else 'green'}, {seconds:.0f} s")
    print("\n" + "\n".join(lines), flush=True)
    return 1 if red else 0


def is_excused(done: Done, ends: Ends, verdicts: Sequence[Verdict]) -> bool:
    """What ended well, and tests that all ran and of which nothing failed but flakes."""
    if done.is_ok:
        return True
    came_to_its_end = done.phase is TESTS and done.status != TOO_LONG and ends.is_whole
    return came_to_its_end and bool(verdicts) and not any(one.is_red for one in verdicts)


def told(machine: str, done: Sequence[Done], red: Sequence[Done], ends: Ends, verdicts: Sequence[Verdict]) -> list[str]:
    lines = [f"GATE    {machine}"]
    for one in done:
        word = "RED" if one in red else "ok" if one.is_ok else "flaky"
        lines.append(f"PHASE   {one.phase.name:7} {word:5} {one.seconds:5.0f} s  {_note(one, ends)}".rstrip())
    is_told = ends.is_whole and any(one.is_red for one in verdicts)
    for one in red:
        if one.phase is not TESTS or not is_told:
            how = "ran out of time" if one.status == TOO_LONG else f"status {one.status}"
            lines.append(f"RED     {one.phase.name}: {how}; again: {' '.join(one.phase.command)}")
            why = chaos.reasons(one) if one.phase.name.startswith("chaos") else []
            lines += [f"        {words[:200]}" for words in why[:MOST_WORDS] or one.words(MOST_WORDS)]
    for verdict in sorted(verdicts, key=lambda one: not one.is_red):
        lines += verdict.lines()
    lines += skips.told(ends.skips())
    if len(lines) >= MOST_LINES:
        lines = [*lines[: MOST_LINES - 2], f"        and {len(lines) - MOST_LINES + 2} more lines"]
    return lines


def _note(done: Done, ends: Ends) -> str:
    if done.phase is not TESTS:
        return "".join(done.words(1))[:80] if done.is_ok else ""
    counts: Counter[str] = Counter(passed=ends.num_passed, failed=len(ends.failures()), skipped=ends.skips().total())
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


if __name__ == "__main__":
    sys.exit(main())
