"""Additions to experts compute what merged weights do, are trained alone, and are published as `peft` names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from gspo_core.learner import Learner
from gspo_core.learner.expert_additions import PROJECTIONS, add_to_experts, expert_stacks
from gspo_core.learner.low_rank import UnsupportedTarget, without_additions
from gspo_core.learner_config import LoraConfig, OptimizerConfig
from gspo_core.lora_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BaseWeights, merged_weights
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import Setting, plan_memory, read_shape
from tests.core.learner_support import (
    MIXTURE,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

LORA = LoraConfig(rank=3, alpha=6, experts=True)
UNGATED = ObjectiveConfig(minibatches=1, k3_gate=None, outlier_gate=None, off_policy_gate=None)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "base", "Qwen3Moe", **MIXTURE)


def draw(learner: Learner, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in learner._policy.named_parameters():
        if "lora_" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def merged_forward(experts: Any, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """By transformers' own plain loop over the sums of weights and additions."""

    def addition(projection: str) -> Tensor:
        up, down = (getattr(experts, f"lora_{half}_{projection}") for half in ("B", "A"))
        return 2.0 * torch.einsum("eor,eri->eoi", up, down)

    gate_up = experts.gate_up_proj + torch.cat([addition("gate_proj"), addition("up_proj")], 1)
    summed = {"gate_up_proj": gate_up, "down_proj": experts.down_proj + addition("down_proj")}
    experts._disable_adapters, kept = True, experts.config._experts_implementation
    experts.config._experts_implementation = "eager"
    try:
        found: Tensor = torch.func.functional_call(experts, summed, given)
    finally:
        experts._disable_adapters, experts.config._experts_implementation = False, kept
    return found


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_results_and_gradients_are_those_of_merged_weights(mixture: Path, rank: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    model.requires_grad_(False)
    add_to_experts(model, rank, 2.0)
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    _, experts = next(expert_stacks(model))
    parameters = [getattr(experts, f"lora_{half}_{name}") for name in PROJECTIONS for half in ("A", "B")]
    for parameter in parameters:
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    hidden = torch.randn(17, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    # the fifth expert is chosen by nobody
    chosen = torch.stack([torch.arange(17) % 4, torch.full((17,), 5)], 1)
    shares = torch.rand(17, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(17, 32, generator=generator, dtype=torch.float64)
    found, expected = experts(hidden, chosen, shares), merged_forward(experts, (hidden, chosen, shares))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [hidden, shares, *parameters]
    ours, theirs = (torch.autograd.grad((one * direction).sum(), inputs) for one in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert all(gradient.abs().max() > 1e-3 for gradient in ours)
    assert not ours[2][4].any()


def by_transformers(model_dir: Path, ids: np.ndarray, temperature: float) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.tensor(ids, dtype=torch.int64)[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": True}, {"lora": LORA.model_copy(update={"target_modules": ("q_proj",)})}],
    ids=["plain", "recomputed", "queries and experts"],
)
def test_they_train_alone_and_are_published_summed(mixture: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = make_learner(mixture)
    learner = make_learner(mixture, UNGATED, optimizer=OptimizerConfig(lr=1e-2), **{"lora": LORA, **options})
    sequences = make_sequences(6)
    with_behavior(plain, sequences)
    np.testing.assert_array_equal(plain.logprobs(sequences)[0], learner.logprobs(sequences)[0])
    start = weights(learner)
    for _ in range(2):
        learner.step(sequences)
    moved = {name for name, value in weights(learner).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    assert sum(".experts.lora_" in name for name in moved) == 2 * 6
    learner.save_weights(tmp_path / "out")
    for sequence, logprobs in zip(sequences, learner.logprobs(sequences), strict=True):
        expected = by_transformers(tmp_path / "out", sequence.token_ids, sequence.temperature)
        np.testing.assert_allclose(logprobs[1:], expected, atol=2e-5)
    assert np.abs(learner.logprobs(sequences)[0] - plain.logprobs(sequences)[0]).max() > 1e-3


def test_the_reference_is_the_base_beneath_them(mixture: Path) -> None:
    learner = make_learner(mixture, ObjectiveConfig(kl_coef=0.5, minibatches=1), lora=LORA)
    draw(learner)
    second = make_learner(mixture)._policy
    sequences = make_sequences(6)
    [micro_batch] = learner._split(sequences, range(len(sequences)))
    with torch.no_grad():
        beneath, above = without_additions(learner._policy, micro_batch), learner._policy(micro_batch)
        assert torch.equal(beneath, second(micro_batch))
    assert (beneath - above).abs().max() > 1e-2
    assert not any(experts._disable_adapters for _, experts in expert_stacks(learner._policy))


def test_in_bfloat16_gradients_arrive_in_float32(mixture: Path) -> None:
    learner = make_learner(mixture, UNGATED, lora=LORA, dtype="bfloat16")
    kinds = set()

    def look(module: Any, _: Any) -> None:
        kinds.add(module.lora_A_gate_proj.dtype)

    _, experts = next(expert_stacks(learner._policy))
    experts.register_forward_pre_hook(look)
    sequences = make_sequences(6)
    with_behavior(learner, sequences)
    start = weights(learner)
    learner.step(sequences)
    assert kinds == {torch.bfloat16}
    assert {value.dtype for name, value in weights(learner).items() if "lora_" in name} == {torch.float32}
    assert largest_difference(start, weights(learner)) > 0


def test_their_state_resumes_exactly(mixture: Path, tmp_path: Path) -> None:
    sequences = make_sequences(6)
    first, second = make_learner(mixture, lora=LORA), make_learner(mixture, lora=LORA, seed=9)
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    second._seed = 0
    for learner in (first, second):
        learner.step(sequences)
    assert largest_difference(weights(first), weights(second)) == 0


# peft asks transformers by a name that transformers gives up
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# and looks for the ranks that it has given to parameters among its modules
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_peft_loads_the_adapter_as_its_own(mixture: Path, tmp_path: Path) -> None:
    """It joins the additions to each expert's projections to additions to its stacks of weights."""
    learner = make_learner(mixture, lora=LORA, publishes_adapter=True)
    draw(learner, 0.2)
    learner.save_weights(tmp_path / "v1")
    names = load_file(tmp_path / "v1" / ADAPTER_WEIGHTS).keys()
    assert "base_model.model.model.layers.0.mlp.experts.4.up_proj.lora_A.weight" in names
    assert len([name for name in names if ".experts." in name]) == 2 * 6 * 3 * 2
    assert "gate_proj" in (tmp_path / "v1" / ADAPTER_CONFIG).read_text()
    load = transformers.AutoModelForCausalLM.from_pretrained
    summed = tmp_path / "summed"
    whole = make_learner(mixture, lora=LORA)
    draw(whole, 0.2)
    whole.save_weights(summed)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before, expected = load(mixture).eval()(ids).logits, load(summed).eval()(ids).logits
        added = peft.PeftModel.from_pretrained(load(mixture), tmp_path / "v1").eval()
        found = added(ids).logits
    assert (before - expected).abs().max() > 1e-2
    assert (found - expected).abs().max() < 1e-4
    merged = merged_weights(BaseWeights(mixture), tmp_path / "v1")
    assert all(torch.equal(merged[name], one) for name, one in load_file(summed / "model.safetensors").items())


@pytest.mark.parametrize("family", ["Qwen3", "Mixtral"])
def test_a_model_without_experts_that_are_known_is_refused(tmp_path: Path, family: str) -> None:
    changes: dict[str, Any] = {} if family == "Qwen3" else {"num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(UnsupportedTarget, match=r"lora\.experts: .*Mixtral" if changes else r"lora\.experts: .*no exp"):
        make_learner(write_model(tmp_path, family, **changes), lora=LORA)


def test_they_are_planned(mixture: Path) -> None:
    learner = make_learner(mixture, lora=LORA)
    added = sum(one.numel() for name, one in learner._policy.named_parameters() if "lora_" in name)
    setting = Setting(read_shape(mixture), device="cpu", is_half=False, lora_rank=3, has_expert_additions=True)
    checkpoint = plan_memory(setting)[-1]
    assert checkpoint.on_device["low-rank additions"] == 4 * added
    assert checkpoint.on_device["moments"] == 8 * added
