"""The engine of the tests computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.learner.model_directory import load_model
from tests.apparatus.small_qwen3 import next_logprobs
from tests.core.learner_support import VOCABULARY, write_model


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3, "tie_word_embeddings": True}])
def test_after_every_prefix_it_says_what_transformers_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = write_model(tmp_path / "model", seed=5, **changes)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 40).tolist()
    with torch.inference_mode():
        logits = load_model(directory, "padded")(input_ids=torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.double(), -1).numpy()
    said = [next_logprobs(str(directory), ids[:end]) for end in range(1, len(ids) + 1)]
    np.testing.assert_allclose(said, expected, atol=2e-5)
