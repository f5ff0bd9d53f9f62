from __future__ import annotations

import pytest

from gspo_core.chat import HermesCodec
from tests.services.rollout.rollout_kit import load_codec


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> HermesCodec:
    return load_codec(tmp_path_factory.mktemp("model"))
