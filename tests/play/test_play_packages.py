"""The unmodified packages that agents are written with play random episodes; `make play` plays more of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.core.qwen_vocabulary import qwen_vocabulary_or_skip
from tests.play.packages import PACKAGES, python_of
from tests.play.run import play

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(python_of(package).exists() for package in PACKAGES.values()),
        reason="the packages are not installed: make test-agents",
    ),
]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_plays_random_episodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    qwen_vocabulary_or_skip()
    monkeypatch.setattr("services.episodes.outbox.DISTANCE_S", 0.0)
    seed = int(os.environ.get("GSPO_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}: GSPO_TEST_SEED={seed} plays the same")
    found = play(PACKAGES[name], seed, range(10), 4, tmp_path)
    assert found.faults == []
    assert found.retries > 0
    assert found.parallel > 0
    assert found.branches["edited_history"] > 0
    assert found.branches["sub_agent"] > 0
