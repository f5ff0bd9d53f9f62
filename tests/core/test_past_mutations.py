"""No single byte of a bundle, of a job's past or of its chain can differ unnoticed: also where logs were archived, and
episodes erased. The seed is drawn, except in CI, and said where one is believed.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.past_mutations import Mutation, mutations_of_bundle, mutations_of_past
from gspo_core.log import layout
from gspo_core.log.archive import pack
from gspo_core.log.batches import HEADER_BYTES, has_erased
from gspo_core.log.erasing import without_texts
from gspo_core.position import Position
from gspo_core.replay.past import Past
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, make_past, spec_of

NUMBER = 50
ERASED, ARCHIVED = 2, (1, 2, 5)
"""A step with an erased episode, and those whose logs are archived."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("jobs")
    made = make_past(root / "job_a", spec_of(write_model(root / "model")))
    batch = Past(made.folder).batch(ERASED)
    written = made.folder / layout.BATCHES
    (written / layout.step_name(Position(1, ERASED))).write_bytes(
        b"".join(without_texts(batch, [((ERASED - 1) * GROUPS, 1)]))
    )
    (made.folder / layout.ARCHIVE).mkdir()
    for step in ARCHIVED:
        log = written / layout.step_name(Position(1, step))
        (made.folder / layout.ARCHIVE / log.name).write_bytes(pack(log.read_bytes()))
        log.unlink()
    return made.folder


def believed(found: list[Mutation]) -> list[Mutation]:
    assert len(found) == NUMBER
    return [one for one in found if not (one.is_refused and one.is_named)]


@pytest.fixture
def seed() -> int:
    return 0 if os.environ.get("CI") else random.SystemRandom().randrange(10**6)


def test_of_a_bundle(folder: Path, seed: int) -> None:
    found = list(mutations_of_bundle(Past(folder), 5, 6, NUMBER, random.Random(seed)))
    assert believed(found) == [], seed
    assert any(layout.ARCHIVE in one.of for one in found)


def test_of_a_past_and_its_chain(folder: Path, seed: int) -> None:
    assert any(has_erased(Past(folder).batch_bytes(step)[:HEADER_BYTES]) for step in ARCHIVED)
    found = list(mutations_of_past(folder, NUMBER, random.Random(seed)))
    assert believed(found) == [], seed
    kinds = {one.of for one in found}
    assert any(kind.startswith(layout.ARCHIVE) for kind in kinds)
    assert "job.chain" in kinds


def test_the_look_itself_notices_what_is_believed(folder: Path, tmp_path: Path) -> None:
    """A file that no audit reads."""
    copy = Path(shutil.copytree(folder, tmp_path / "job_a"))
    (copy / layout.CHECKPOINTS / "notes.txt").write_text("nothing")
    found = list(mutations_of_past(copy, NUMBER, random.Random(0)))
    assert {one.of for one in found if not one.is_refused} == {"checkpoints/notes.txt"}
