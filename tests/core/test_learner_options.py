"""Every option of the learner and its optimizer acts: one that does nothing would lie to whoever sets it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_core.learner import Learner, logprobs
from gspo_core.learner.moments import KeptAdamW
from gspo_core.learner_config import LearnerConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    MIXTURE,
    largest_difference,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

OPTIMIZER: dict[str, list[dict[str, Any]]] = {
    "lr": [{"lr": 2e-3}],
    "betas": [{"betas": [0.5, 0.999]}, {"betas": [0.9, 0.9]}],
    "eps": [{"eps": 1e-2}],
    "weight_decay": [{"weight_decay": 0.5}],
    "schedule": [{"schedule": "linear", "decay_steps": 4}, {"schedule": "cosine", "decay_steps": 4}],
    "warmup_steps": [{"warmup_steps": 3}],
    "decay_steps": [{"schedule": "linear", "decay_steps": 8}],
    "min_lr_ratio": [{"schedule": "linear", "decay_steps": 4, "min_lr_ratio": 0.5}],
    "max_grad_norm": [{"max_grad_norm": 1e-3}],
    "max_grad_growth": [{"max_grad_growth": 1.0, "max_grad_norm": None}],
    "max_step_k3": [{"max_step_k3": 1e-9}],
    "ess_scaling": [{"ess_scaling": True}],
    "signal_scaling": [{"signal_scaling": True}],
    "moments": [{"moments": "8bit"}],
}
# What it is compared with, where that is not the default.
BESIDE: dict[str, dict[str, Any]] = {
    "decay_steps": {"schedule": "linear", "decay_steps": 4},
    "max_grad_growth": {"max_grad_norm": None},
    "min_lr_ratio": {"schedule": "linear", "decay_steps": 4},
}
PLAIN = ObjectiveConfig(minibatches=2, clip=0.5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "model", "Qwen3Moe", **MIXTURE)


def trained(model_dir: Path, optimizer: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    config = LearnerConfig(optimizer=OptimizerConfig(**{"lr": 1e-3, **optimizer}), **options)
    learner = Learner(model_dir, config, PLAIN, seed=0)
    sequences = make_sequences(6)
    with_behavior(learner, sequences)
    sequences[3] = dataclasses.replace(sequences[3], advantages=0.0)  # teaches nothing
    for _ in range(2):
        learner.step(sequences)
    return weights(learner)


def test_every_option_is_tried() -> None:
    assert OPTIMIZER.keys() == OptimizerConfig.model_fields.keys()
    elsewhere = {"optimizer", "total_steps", "longest_sequence"}  # the last acts on a GPU: test_plan
    elsewhere |= {"context_parallel", "replicas"}  # they need ranks: test_learner_arranged
    elsewhere |= {"policy", "compile_layers"}  # test_policy, test_learner_recomputed
    elsewhere |= {"publishes_adapter"}  # what it changes is what is published: test_engine_adapters
    assert ACTIONS.keys() | elsewhere == LearnerConfig.model_fields.keys()


@pytest.mark.parametrize(("key", "change"), [(key, one) for key, many in OPTIMIZER.items() for one in many], ids=str)
def test_every_key_of_the_optimizer_acts(model_dir: Path, key: str, change: dict[str, Any]) -> None:
    plain = trained(model_dir, BESIDE.get(key, {}))
    assert largest_difference(plain, trained(model_dir, change)) > 1e-6


def test_total_steps_end_a_schedule(model_dir: Path) -> None:
    first, second = (trained(model_dir, {"schedule": "linear"}, total_steps=steps) for steps in (4, 8))
    assert largest_difference(first, second) > 1e-6


class Watch:
    """How a step went: forward passes of the first layer, the widest chunk of the head, what entered the model."""

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.num_passes = 0
        self.widest = 0
        self.rows: set[int] = set()
        self.dtypes: set[torch.dtype] = set()
        learner = Learner(model_dir, LearnerConfig(optimizer=OptimizerConfig(lr=1e-3), **options), PLAIN, seed=0)
        sequences = make_sequences(6)
        with_behavior(learner, sequences)
        layer = learner._policy.model.model.layers[0]
        layer.mlp.register_forward_pre_hook(self._look)
        right = logprobs._logits
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "_logits", lambda hidden, *rest: self._measure(right, hidden, *rest))
            learner.step(sequences)
        self.trainable = sum(p.numel() for p in learner._policy.parameters() if p.requires_grad)
        self.replays = learner._routing is not None
        self.is_fused = bool(learner._optimizer.param_groups[0].get("fused"))
        self.is_offloaded = isinstance(learner._optimizer, KeptAdamW) and learner._optimizer.on_host

    def _look(self, _: Any, given: tuple[torch.Tensor, ...]) -> None:
        self.num_passes += 1
        self.rows.add(given[0].shape[0])

    def _measure(self, right: Any, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.widest = max(self.widest, len(hidden))
        self.dtypes.add(hidden.dtype)
        logits: torch.Tensor = right(hidden, *rest)
        return logits


ACTIONS: dict[str, tuple[Any, Any]] = {
    "micro_batch_tokens": (60, lambda plain, changed: changed.num_passes > plain.num_passes),
    "layout": ("padded", lambda plain, changed: plain.rows == {1} and max(changed.rows) > 1),
    "logprob_chunk_tokens": (3, lambda plain, changed: plain.widest > changed.widest == 3),
    "dtype": ("bfloat16", lambda _, changed: changed.dtypes == {torch.bfloat16}),
    # the layers of both updates once more in the backward pass; the proximal pass has none
    "activation_checkpointing": (True, lambda plain, changed: changed.num_passes == plain.num_passes + 2),
    "routing_replay": (True, lambda plain, changed: changed.replays and not plain.replays),
    "fused_optimizer": (True, lambda plain, changed: changed.is_fused and not plain.is_fused),
    "offload_moments": (True, lambda plain, changed: changed.is_offloaded and not plain.is_offloaded),
    "lora": ({"rank": 2}, lambda plain, changed: changed.trainable < plain.trainable / 4),
}


@pytest.mark.parametrize("key", ACTIONS)
def test_every_option_acts(model_dir: Path, mixture_dir: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    value, acts = ACTIONS[key]
    directory = mixture_dir if key == "routing_replay" else model_dir
    plain, changed = Watch(directory, monkeypatch), Watch(directory, monkeypatch, **{key: value})
    assert acts(plain, changed), (vars(plain), vars(changed))
