from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.model import make_demo_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "calculator-tiny"
    make_demo_model(directory)
    return directory
