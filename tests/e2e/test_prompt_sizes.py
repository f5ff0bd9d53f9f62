"""A job is trained whatever the length of its prompts: the whole stack, the embedded engine, real log-probs.

The model is small and knows nothing, so it says anything; what counts is that every engine is found to compute what the
trainer computes, and that each trained token follows from the weights that it is recorded under.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.demo.demo import NO_KEYS
from examples.demo.provenance import check_provenance
from gspo_core.client import Client
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from tests.chaos.talk import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONTEXT_TOKENS = 32_768
NEW_TOKENS = 24
WORLD = """
class Long:
    tasks = [{"number": number} for number in range(8)]

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words

    def reset(self, number: int) -> str:
        return str(number) + " so" * self._num_words

    def get_reward(self) -> float:
        return float(id(self) % 7)
"""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "long"
    write_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def spec(model_dir: Path, world: Path, num_words: int) -> dict[str, Any]:
    return {
        "model": str(model_dir),
        "environments": [{"ref": f"{world}:Long", "config": {"num_words": num_words}}],
        "rollout": {"group_size": 2, "max_staleness": 1},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "limits": {"max_turns": 1, "max_context_tokens": CONTEXT_TOKENS},
        "groups_per_step": 2,
        "steps": 2,
        "evaluation": None,
        "resources": {"device": "cpu"},
        "seed": 5,
    }


def test_jobs_with_prompts_from_short_to_thirty_thousand_tokens_are_trained(long_model: Path, tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD)
    data = tmp_path / "data"
    lengths = []
    with (
        Stack(StackConfig(data, long_model, port=0, environment=NO_KEYS)) as stack,
        Client(stack.api_url) as client,
    ):
        for num_words in (1, 200, *range(238, 250), 4_000, 30_000):
            job = client.create_job(spec(long_model, world, num_words))["id"]
            for _ in client.events(job, after="0"):
                pass
            record = client.job(job)
            assert record["status"] == "succeeded", (num_words, record["status_reason"])
            directory = JobDir(data / "jobs" / job)
            (first, *_) = next(iter(BatchLog(directory).read(1, 1).groups)).trajectories
            lengths.append(int(first.branches[0].action_mask.argmax()))
            checked = check_provenance(directory, 20 if num_words < 1_000 else 2, seed=0)  # each is a whole forward
            assert checked.num_equal == checked.num_tokens > 0
    print("prompt lengths:", lengths)
    assert min(lengths) < 255
    assert {255, 256, 257} <= set(lengths)
    assert max(lengths) > 30_000
