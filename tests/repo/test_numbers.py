"""Numbers that the pages state are the constants of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

# page, what it says, and for each number in brackets its file, its name there and the unit that the page counts in
NUMBERS: list[tuple[str, str, list[tuple[str, str, float]]]] = [
    ("docs/api.md", r"all that is kept \(the newest ([\d,]+)\)", [("services/state/lua/jobs.lua", "EVENTS_KEPT", 1)]),
    (
        "docs/architecture.md",
        r"asking the engine; (\d+) at first.*pause of up to (\d+) s.*\| (\d+) MiB a call, (\d+) ms between",
        [
            ("services/workers/in_flight.py", "_START", 1),
            ("services/workers/quarantine.py", "MAX_PAUSE_S", 1),
            ("services/episodes/outbox.py", "MAX_CALL_BYTES", MIB),
            ("services/episodes/outbox.py", "DISTANCE_S", 0.001),
        ],
    ),
    (
        "docs/architecture.md",
        r"\| (\d+) requests a second, bursts of (\d+) \|",
        [("services/api/http/limits.py", "REQUESTS_PER_S", 1), ("services/api/http/limits.py", "BURST", 1)],
    ),
    ("docs/api.md", r"Every (\d+) s of silence", [("services/api/http/sse.py", "PING_S", 1)]),
    ("docs/api.md", r"waits for it \((\d+) s", [("services/api/http/repeats.py", "WAIT_S", 1)]),
    (
        "docs/api.md",
        r"kept for (\d+) hours, at most ([\d,]+) and (\d+) MiB",
        [
            ("services/state/kept_replies.py", "KEPT_S", 3600),
            ("services/state/lua/replies.lua", "REPLIES_KEPT", 1),
            ("services/state/lua/replies.lua", "REPLY_BYTES_KEPT", MIB),
        ],
    ),
    (
        "docs/api.md",
        r"at most ([\d,]+) files, (\d+) MiB unpacked and (\d+) times its size",
        [
            ("services/hosts/archives.py", "MAX_FILES", 1),
            ("services/hosts/archives.py", "MAX_UNPACKED_BYTES", MIB),
            ("services/hosts/archives.py", "MAX_RATIO", 1),
        ],
    ),
    (
        "docs/api.md",
        r"A body has at most (\d+) MiB and (\d+) items",
        [
            ("services/api/http/requests.py", "MAX_BODY_BYTES", MIB),
            ("services/api/submission/trajectories.py", "MAX_ITEMS", 1),
        ],
    ),
    (
        "docs/api.md",
        r"`body_too_large` \((\d+) MiB; uploads (\d+) MiB\)",
        [
            ("services/api/http/requests.py", "MAX_BODY_BYTES", MIB),
            ("services/hosts/archives.py", "MAX_PACKED_BYTES", MIB),
        ],
    ),
    (
        "docs/api.md",
        r"may ask (\d+) times a second, and (\d+) times at once",
        [("services/api/http/limits.py", "REQUESTS_PER_S", 1), ("services/api/http/limits.py", "BURST", 1)],
    ),
    ("docs/control.md", r"lists the last (\d+) \*\*attempts", [("services/state/lua/jobs.lua", "ATTEMPTS_KEPT", 1)]),
    ("docs/control.md", r"less than (\d+) % free", [("services/trainer/telling/alarms.py", "MIN_DISK_FREE", 0.01)]),
    ("docs/engines.md", r"starts with (\d+) requests", [("services/workers/in_flight.py", "_START", 1)]),
    (
        "docs/hosts.md",
        r"`async` \| (\d+) \|.*snapshots \| (\d+), a thread each",
        [
            ("services/hosts/inside/traits.py", "ASYNC_SESSIONS", 1),
            ("services/hosts/inside/traits.py", "THREAD_SESSIONS", 1),
        ],
    ),
    (
        "docs/objective.md",
        r"fraction above ([\d.]+);.*more than ([\d.]+) apart.*sequences below ([\d.]+),.*more than (\d) standard",
        [
            ("gspo_core/objective/alarms.py", "MAX_CLIP_FRAC", 1),
            ("gspo_core/objective/alarms.py", "MAX_CLIP_DIFFERENCE", 1),
            ("gspo_core/objective/alarms.py", "MIN_ESS", 1),
            ("gspo_core/objective/alarms.py", "MAX_STANDARD_ERRORS", 1),
        ],
    ),
    ("docs/operations.md", r"under way \((\d+) s at most\)", [("services/hosts/service.py", "LEAVING_S", 1)]),
    (
        "docs/ranks.md",
        r"every (\d+) seconds\) fails.*time out after (\d+) minutes.*waits a (minute).*take an (hour) of silence",
        [
            ("services/trainer/ranks/followers.py", "BEAT_S", 1),
            ("services/trainer/ranks/lines.py", "COLLECTIVE_TIMEOUT_S", 60),
            ("services/trainer/ranks/followers.py", "AFTER_FAILURE_S", 60),
            ("services/trainer/ranks/followers.py", "PATIENCE_S", 3600),
        ],
    ),
    ("docs/recovery.md", r"tries again every (two) seconds", [("services/files/disk_space.py", "RETRY_S", 1)]),
    (
        "docs/redis.md",
        r"Events \(([\d,]+)\), metrics \(([\d,]+) steps\), dead letters \(([\d,]+)\), idempotency .* \(([\d,]+)\) and",
        [
            ("services/state/lua/jobs.lua", "EVENTS_KEPT", 1),
            ("services/state/lua/records.lua", "METRIC_STEPS_KEPT", 1),
            ("services/state/lua/queue_records.lua", "DEAD_LETTERS_KEPT", 1),
            ("services/state/lua/service.lua", "IDEMPOTENCY_KEPT", 1),
        ],
    ),
    (
        "docs/redis.md",
        r"may need \((\d+) for each token",
        [("services/trainer/groups/admission.py", "BYTES_PER_TOKEN", 1)],
    ),
    (
        "docs/operations.md",
        r"unfinished groups, about (\d+) bytes for each token",
        [("services/trainer/groups/admission.py", "BYTES_PER_TOKEN", 1)],
    ),
    ("docs/rollout.md", r"for more than (\d+) s beyond the drain", [("services/rollout/__main__.py", "LEAVING_S", 1)]),
    ("docs/rollout.md", r"at most (\d+) MiB\)", [("services/episodes/worlds.py", "MAX_WORLD_BYTES", MIB)]),
    (
        "docs/rollout.md",
        r"After (\d+) failed attempts.*again after (\d+) s, then 2 s, up to (\d+) s",
        [
            ("services/workers/quarantine.py", "MOST_FAILURES", 1),
            ("services/workers/quarantine.py", "FIRST_PAUSE_S", 1),
            ("services/workers/quarantine.py", "MAX_PAUSE_S", 1),
        ],
    ),
]
WORDS = {"two": 2.0, "minute": 1.0, "hour": 1.0}


def constant(file: str, name: str) -> float:
    """``A = 3`` and ``A, B = 3, 4``, in Python and in Lua."""
    found = re.search(
        rf"^(?:local )?(.*\b)?{re.escape(name)}\b([^=\n]*)= ?([^#\n]+)", (ROOT / file).read_text(), re.MULTILINE
    )
    assert found, f"{file} has no {name}"
    place = (found[1] or "").count(",") if "(" not in (found[1] or "") else 0
    value = found[3].rstrip(" )").split(",")[place]
    assert re.fullmatch(r"[\d._* <]+", value), (file, name, value)
    return float(eval(value))


@pytest.mark.parametrize(("page", "said", "meant"), NUMBERS)
def test_a_number_is_the_constant(page: str, said: str, meant: list[tuple[str, str, float]]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(said, text)
    assert found, f"{page} no longer says so: change NUMBERS with it"
    numbers = [WORDS[one] if one in WORDS else float(one.replace(",", "")) for one in found.groups()]
    assert numbers == pytest.approx([constant(file, name) / unit for file, name, unit in meant])
