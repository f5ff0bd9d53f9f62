from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.demo.model import make_demo_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if made := os.environ.get("GSPO_TEST_DEMO_MODEL"):  # by `python -m examples.demo.model`, to save its minutes
        return Path(made)
    directory = tmp_path_factory.mktemp("model") / "calculator-tiny"
    make_demo_model(directory)
    return directory
