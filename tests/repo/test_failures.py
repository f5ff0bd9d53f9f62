"""docs/failures.md explains every cause that the code knows, and says of it what the code says."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

import pytest

import gspo_core.assemble  # noqa: F401 - its refusals are subclasses
from gspo_core.codec import SegmentRejected
from services.files.disk_space import NoRoom
from services.process.settings import PREFIX, Settings
from services.state.client import Away, AwayReason
from services.state.jobs import CountedCode, FreeCode
from services.state.queue_records import DropReason, GroupEnd
from services.state.refusals import Damaged
from services.trainer.attempt import end_of
from services.trainer.groups.selection import nothing_to_train
from services.trainer.telling.failure import AttemptFailed
from tests.repo.failure_causes import causes
from tests.repo.failures import PAGE, ROOT, rows, shown_by, written

ROWS = rows()
# Told apart in the log alone; the row has their common name.
REFUSED_SEGMENTS = {one.__name__ for one in SegmentRejected.__subclasses__()}
SOURCES = [
    path for top in ("gspo_core", "services") for path in (ROOT / top).rglob("*") if path.suffix in (".py", ".lua")
]


def bare(cause: str) -> str:
    return cause.partition(":")[2]


def test_every_cause_has_a_row() -> None:
    explained = {name for row in ROWS for name in row.names} | REFUSED_SEGMENTS
    assert sorted(one for one in causes() if bare(one) not in explained) == []


def test_rows_mark_as_code_what_the_code_has() -> None:
    settings = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    known = set(re.findall(r"\w+", "".join(path.read_text() for path in SOURCES))) | settings
    assert {row.number: sorted(row.names - known) for row in ROWS if row.names - known} == {}


def test_rows_are_numbered_once_and_each_names_its_tests() -> None:
    numbers = Counter(row.number for row in ROWS)
    assert sorted(numbers) == list(range(1, len(ROWS) + 1))
    assert set(numbers) == set(shown_by())
    assert [row.number for row in ROWS if not all(row.cells)] == []
    names = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    shown = [one.partition("::") for those in shown_by().values() for one in those]
    assert [one for one in shown if f"def {one[2]}(" not in names.get(one[0], "")] == []


def test_tables_that_the_code_knows_better_are_as_it_has_them() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.parametrize("reason", ["partial", "zero_variance", "mismatch", "unreadable"])
def test_groups_that_are_dropped_again_and_again_end_the_job_with_the_code_of_their_row(reason: str) -> None:
    (dropped,) = [one for one in get_args(DropReason) if one == f"dropped_{reason}"]
    code = nothing_to_train(Counter({dropped: 8})).code
    assert [row for row in ROWS if {dropped, code} <= row.names]


def test_attempts_count_as_the_page_says() -> None:
    counted = [AttemptFailed(code, "") for code in get_args(CountedCode)]
    assert [(end_of(one).how, end_of(one).code) for one in counted] == [("attempt_failed", one.code) for one in counted]
    assert (end_of(Damaged()).how, end_of(Damaged()).code) == ("attempt_failed", "queue_damaged")
    for error in (Away(AwayReason.UNREACHABLE), NoRoom()):
        assert end_of(error).how == "released"
        assert end_of(error).code in get_args(FreeCode)
    for row in ROWS:
        for name in row.names:
            if name in (*get_args(CountedCode), *get_args(FreeCode)):
                assert ("which counts" if name in get_args(CountedCode) else "not count") in row.job, name


def test_redis_says_nothing_that_is_not_listed() -> None:
    text = "".join(path.read_text() for path in (ROOT / "services" / "state" / "lua").glob("*.lua"))
    drops = set(re.findall(r'"(dropped_[a-z_]+)"', text))
    codes = set(re.findall(r'(?:"failed", now|end_attempt\(K, now), "([a-z_]+)"', text))
    assert drops == {"dropped_job_over", "dropped_queue_damaged"}
    assert codes == {"max_attempts_exceeded", "trainer_lost"}
    known = {bare(name) for name in causes()}
    assert drops | codes <= known
    assert {one for one in get_args(GroupEnd) if isinstance(one, str)} <= known
