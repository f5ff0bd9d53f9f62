from __future__ import annotations

import pytest

from gspo_core.chat import HermesCodec
from tests.services.rollout.rollout_kit import load_codec


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of an outbox keep a distance, which would be most of the time of hundreds of short episodes."""
    monkeypatch.setattr("services.episodes.outbox.DISTANCE_S", 0.0)
