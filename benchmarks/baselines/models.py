"""The models that cells start from: those of both demos, a mixture of experts that went to the first one's school, and
one that was shown worse habits.

Rule: made once, under the working directory; a directory is complete or absent.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.baselines import cashbook_demonstrations
from benchmarks.baselines.cells import Model
from examples.demo import search_demonstrations
from examples.demo.course import Course
from examples.demo.demonstrations import COURSE, CalculatorMistakes
from examples.demo.model import BATCH_SIZE, School, make_demo_model

MIXTURE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}

RARELY_RIGHT = CalculatorMistakes(guess=0.75, malformed=0.3, shortened=0.3, talkative=0.8)
"""About one demonstration in thirty is right."""
COURSES: Mapping[str, Course] = {
    "dense": COURSE,
    "rare": dataclasses.replace(COURSE, mistakes=RARELY_RIGHT),
    "search": search_demonstrations.COURSE,
    "cashbook": cashbook_demonstrations.COURSE,
}


def model_dir(work: Path, model: Model, *, say: Callable[[str], None] = print) -> Path:
    """Where it lies; made first where it is not there."""
    directory = work / "models" / model
    if model in COURSES:
        make_demo_model(directory, taught=COURSES[model], say=say)
    elif not directory.exists():
        _make_mixture(directory, say)
    return directory


def _make_mixture(directory: Path, say: Callable[[str], None]) -> None:
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        untrained = Path(scratch) / "random"
        school = School(untrained, 0)
        _write_untrained(untrained, school)
        optimizer = OptimizerConfig(
            lr=3e-3, betas=(0.9, 0.99), weight_decay=0.01, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1
        )
        learner = Learner(
            untrained, LearnerConfig(optimizer=optimizer, total_steps=COURSE.num_steps), ObjectiveConfig(), seed=0
        )
        say(f"mixture of experts: {COURSE.num_steps} steps of {BATCH_SIZE} lessons begin")
        for step, lessons in enumerate(school.curriculum(), 1):
            loss = learner.supervised_step(lessons)["supervised/loss"]
            if step % 25 == 0:
                say(f"mixture of experts: step {step}, loss {loss:.2f}")
        made = Path(scratch) / "made"
        learner.save_weights(made)
        os.rename(made, directory)


def _write_untrained(directory: Path, school: School) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    codec = school.codec
    config = Qwen3MoeConfig(
        vocab_size=codec.tokenizer.vocab_size,
        bos_token_id=None,
        eos_token_id=codec.stop_ids[0],
        pad_token_id=codec.stop_ids[1],
        dtype="float32",
        **MIXTURE,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
