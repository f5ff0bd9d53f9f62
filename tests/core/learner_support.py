"""Tiny models and ragged batches for the tests of the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # far from uniform, so that a wrong token or position shows
}
MIXTURE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Makes an update nearly linear in the gradient, so that comparing weights compares gradients.
LINEAR = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
GATED = ObjectiveConfig(minibatches=3, k3_gate=0.02, clip=[0.01, 0.012])


def write_model(directory: Path, family: str = "Qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A randomly initialised model of a transformers family as a model directory."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    transformers_logging.disable_progress_bar()
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def make_learner(
    model_dir: Path,
    objective: ObjectiveConfig = GATED,
    *,
    seed: int = 0,
    optimizer: OptimizerConfig = LINEAR,
    **config: Any,
) -> Learner:
    return Learner(model_dir, LearnerConfig(optimizer=optimizer, **config), objective, seed=seed)


def make_sequences(
    num: int = 14, *, seed: int = 0, longest: int = 60, per_token_advantages: bool = False
) -> list[TrainSequence]:
    """Ragged episodes of several turns: groups share a prompt, all share a preamble, one has no actions."""
    rng = np.random.default_rng(seed)
    preamble = rng.integers(0, VOCABULARY, 18)
    prompts = [np.concatenate([preamble, rng.integers(0, VOCABULARY, 3 + 5 * g)]) for g in range(4)]
    sequences = []
    for index in range(num):
        prompt = prompts[index % len(prompts)]
        answer = rng.integers(0, VOCABULARY, int(rng.integers(4, longest - len(prompt))))
        ids = np.concatenate([prompt, answer])
        acts = (np.arange(len(ids)) >= len(prompt)) & (rng.random(len(ids)) < 0.8)
        if index == 1:
            acts[:] = False
        advantages = rng.normal(size=len(ids)) if per_token_advantages else float(rng.normal())
        sequences.append(
            TrainSequence(
                token_ids=ids,
                action_mask=acts,
                behavior_logprobs=np.where(acts, -4.0, 0.0),
                turn_ids=np.cumsum(np.diff(acts.astype(int), prepend=0) > 0),
                staleness=rng.integers(0, 4, len(ids)),
                advantages=advantages,
                weight=0.5 if index in (2, 3) else 1.0,
                temperature=0.7 if index % 3 else 1.0,
            )
        )
    return sequences


def with_behavior(learner: Learner, sequences: list[TrainSequence], *, noise: float = 0.1, seed: int = 0) -> None:
    """Record the learner's own log-probs as the sampler's, a few sequences far enough off to be gated."""
    rng = np.random.default_rng(seed)
    for index, (sequence, logprobs) in enumerate(zip(sequences, learner.logprobs(sequences), strict=True)):
        scale = 4 * noise if index % 5 == 0 else noise
        recorded = np.minimum(logprobs + rng.normal(0, scale, len(logprobs)), -1e-3)
        object.__setattr__(sequence, "behavior_logprobs", np.where(sequence.action_mask, recorded, 0).astype("f4"))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner._policy.named_parameters()}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    """NaN where any is: Python's `max` would pass it over, torch's does not."""
    return float(torch.stack([(first[name] - second[name]).abs().max().double() for name in first]).max())


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    files = map(load_file, sorted(directory.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}
