"""docs/failures.md explains every cause that the code knows, and says of it what the code says."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

import pytest

import gspo_core.assemble  # noqa: F401 - its refusals are subclasses
from gspo_core.codec import SegmentRejected
from services.files.disk_space import NoRoom
from services.state.away import Away, AwayReason
from services.state.jobs import CountedCode, FreeCode
from services.state.queue_records import DropReason, GroupEnd
from services.state.refusals import Damaged
from services.trainer.attempt import end_of
from services.trainer.groups.selection import nothing_to_train
from services.trainer.telling.failure import AttemptFailed
from tests.repo.failure_causes import causes
from tests.repo.failure_row import Row
from tests.repo.failure_rows import SECTIONS
from tests.repo.failures import ROOT

ROWS = [row for _, rows in SECTIONS for row in rows]
# Told apart in the log alone; the row has their common name.
REFUSED_SEGMENTS = {f"error:{one.__name__}" for one in SegmentRejected.__subclasses__()}


def test_every_cause_has_a_row_and_every_row_a_cause_that_exists() -> None:
    explained = {name for row in ROWS for name in row.names}
    assert sorted(causes() - explained) == [], "rows of tests/repo/failure_rows.py lack these causes of the code"
    assert sorted(explained - causes()) == [], "the code knows these causes no more"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.cause[:40])
def test_a_row_says_its_codes(row: Row) -> None:
    text = " ".join((row.cause, row.episode, row.group, row.job, row.trained))
    said = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}
    assert {name for name in row.names if name.partition(":")[2] not in said} - REFUSED_SEGMENTS == set()


@pytest.mark.parametrize("reason", ["partial", "zero_variance", "mismatch", "unreadable"])
def test_groups_that_are_dropped_again_and_again_end_the_job_with_the_code_of_their_row(reason: str) -> None:
    (dropped,) = [one for one in get_args(DropReason) if one == f"dropped_{reason}"]
    code = nothing_to_train(Counter({dropped: 8})).code
    assert [row for row in ROWS if {f"group:{dropped}", f"code:{code}"} <= set(row.names)]


def test_attempts_count_as_the_page_says() -> None:
    counted = [AttemptFailed(code, "") for code in get_args(CountedCode)]
    assert [(end_of(one).how, end_of(one).code) for one in counted] == [("attempt_failed", one.code) for one in counted]
    assert (end_of(Damaged()).how, end_of(Damaged()).code) == ("attempt_failed", "queue_damaged")
    for error in (Away(AwayReason.UNREACHABLE), NoRoom()):
        assert end_of(error).how == "released"
        assert end_of(error).code in get_args(FreeCode)
    for row in ROWS:
        for name in row.names:
            kind, _, code = name.partition(":")
            if kind == "code" and code in (*get_args(CountedCode), *get_args(FreeCode)):
                assert ("which counts" if code in get_args(CountedCode) else "not count") in row.job, name


def test_redis_says_nothing_that_is_not_listed() -> None:
    text = "".join(path.read_text() for path in (ROOT / "services" / "state" / "lua").glob("*.lua"))
    drops = set(re.findall(r'"(dropped_[a-z_]+)"', text))
    codes = set(re.findall(r'(?:"failed", now|end_attempt\(K, now), "([a-z_]+)"', text))
    assert drops == {"dropped_job_over", "dropped_queue_damaged"}
    assert codes == {"max_attempts_exceeded", "trainer_lost"}
    known = {name.partition(":")[2] for name in causes()}
    assert drops | codes <= known
    assert {one for one in get_args(GroupEnd) if isinstance(one, str)} <= known
