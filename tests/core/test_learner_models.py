"""Families of models, layouts and options: each computes what the model itself computes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from gspo_core.batch import TrainSequence
from gspo_core.learner import Learner, policy_model
from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.learner.low_rank import UnsupportedTarget
from gspo_core.learner.model_directory import UnsupportedModel, load_model
from gspo_core.learner.routing import UnsupportedRouter
from gspo_core.learner.state import InvalidState
from gspo_core.learner_config import LoraConfig, OptimizerConfig
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    MIXTURE,
    VOCABULARY,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3 with tied embeddings": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 with a window": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3 mixture": ("Qwen3Moe", MIXTURE),
    "qwen2 with biases": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "llama with scaled rotations": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("Mistral", {"sliding_window": 9}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_model(root / str(number), family, **changes)
        for number, (name, (family, changes)) in enumerate(FAMILIES.items())
    }


def by_transformers(model_dir: Path, sequence: TrainSequence) -> np.ndarray:
    """Log-probs of one sequence by the model's own forward pass with its plainest attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor(sequence.token_ids, dtype=torch.int64)[None]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1] / sequence.temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_model(directories: dict[str, Path], family: str, layout: str) -> None:
    sequences = make_sequences(6)
    learner = make_learner(directories[family], layout=layout)
    for sequence, logprobs in zip(sequences, learner.logprobs(sequences), strict=True):
        assert logprobs[0] == 0
        np.testing.assert_allclose(logprobs[1:], by_transformers(directories[family], sequence), atol=2e-5)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_where_only_sampled_tokens_are_asked_for_the_head_runs_for_no_other(
    directories: dict[str, Path], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 152,000 tokens to choose from, the head of a prompt of 30,000 took minutes that nobody needed."""
    sequences = make_sequences(6)
    sequences[2] = dataclasses.replace(sequences[2], action_mask=np.zeros_like(sequences[2].action_mask))
    learner = make_learner(directories["llama"], layout=layout)
    every = learner.logprobs(sequences)
    num_rows = 0

    def counting(hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_rows
        num_rows += len(hidden)
        return chosen_logprobs(hidden, *arguments, **options)

    monkeypatch.setattr(policy_model, "chosen_logprobs", counting)
    sampled = learner.logprobs(sequences, sampled_only=True)
    for sequence, some, whole in zip(sequences, sampled, every, strict=True):
        np.testing.assert_allclose(some, np.where(sequence.action_mask, whole, 0), atol=2e-5)
    assert 0 < num_rows <= sum(int(sequence.action_mask.sum()) for sequence in sequences)


@pytest.mark.parametrize("family", ["qwen3 with tied embeddings", "qwen3 mixture", "llama"])
def test_published_weights_are_the_policy(directories: dict[str, Path], family: str, tmp_path: Path) -> None:
    source = directories[family]
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "code.py").write_text("raise SystemExit")
    (source / "manifest.json").write_text("{}")  # of a version of another job
    learner = make_learner(source)
    sequences = make_sequences(6)
    with_behavior(learner, sequences)
    learner.step(sequences)
    learner.save_weights(tmp_path / "out")
    for sequence, logprobs in zip(sequences, learner.logprobs(sequences), strict=True):
        np.testing.assert_allclose(logprobs[1:], by_transformers(tmp_path / "out", sequence), atol=2e-5)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "out/code.py").exists()
    assert not (tmp_path / "out/manifest.json").exists()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    # the names that engines know are those that training started from
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(source / "model.safetensors").keys()


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(directories: dict[str, Path], tmp_path: Path) -> None:
    exact, half = (make_learner(directories["qwen3"], dtype=dtype) for dtype in ("float32", "bfloat16"))
    sequences = make_sequences(6)
    with_behavior(exact, sequences)
    for first, second in zip(exact.logprobs(sequences), half.logprobs(sequences), strict=True):
        assert 1e-4 < np.abs(first - second).max() < 0.2
    start = weights(half)
    half.step(sequences)
    moved = weights(half)
    assert {value.dtype for value in moved.values()} == {torch.float32}
    assert largest_difference(start, moved) > 1e-4
    half.save_weights(tmp_path / "out")
    assert {v.dtype for v in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


LORA = LoraConfig(rank=4, alpha=8)
UNGATED = ObjectiveConfig(minibatches=1, k3_gate=None, outlier_gate=None, off_policy_gate=None)


@pytest.mark.parametrize("family", ["qwen3 with tied embeddings", "qwen3 mixture", "qwen2 with biases"])
def test_low_rank_additions_train_alone_and_are_published_summed(
    directories: dict[str, Path], tmp_path: Path, family: str
) -> None:
    source = directories[family]
    plain = make_learner(source)
    learner = make_learner(source, UNGATED, lora=LORA, optimizer=OptimizerConfig(lr=1e-2))
    sequences = make_sequences(6)
    with_behavior(plain, sequences)
    np.testing.assert_array_equal(plain.logprobs(sequences)[0], learner.logprobs(sequences)[0])
    start = weights(learner)
    for _ in range(2):
        learner.step(sequences)
    moved = {name for name, value in weights(learner).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    learner.save_weights(tmp_path / "out")
    for sequence, logprobs in zip(sequences, learner.logprobs(sequences), strict=True):
        np.testing.assert_allclose(logprobs[1:], by_transformers(tmp_path / "out", sequence), atol=2e-5)
    assert np.abs(learner.logprobs(sequences)[0] - plain.logprobs(sequences)[0]).max() > 1e-3


def test_an_export_holds_one_addition_at_a_time(tmp_path: Path) -> None:
    """All additions together are as large as the model, and a second set of summed weights is too."""
    learner = make_learner(write_model(tmp_path, num_hidden_layers=6), lora=LORA)
    sizes = [4 * parameter.numel() for parameter in learner._policy.parameters()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        learner.copy_weights()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    assert sum(sizes) <= max(held) <= sum(sizes) + max(sizes)


def test_low_rank_additions_to_experts_are_refused(directories: dict[str, Path]) -> None:
    """They are one tensor for all experts, which the published weights could not be made of."""
    with pytest.raises(UnsupportedTarget, match="not a linear layer"):
        make_learner(directories["qwen3 mixture"], lora=LoraConfig(target_modules=("q_proj", "down_proj")))


def test_low_rank_state_resumes_exactly_and_holds_no_frozen_weights(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    source, sequences = directories["qwen3"], make_sequences(6)
    first = make_learner(source, lora=LORA)
    with_behavior(first, sequences)
    first.step(sequences)
    first.save_state(tmp_path / "state")
    second = make_learner(source, lora=LORA, seed=9)
    second.load_state(tmp_path / "state")
    saved = load_file(tmp_path / "state/rank-00000.safetensors").keys() - {"random/cpu"}
    assert saved
    assert all("lora_" in name for name in saved)
    second._seed = 0
    first.step(sequences)
    second.step(sequences)
    assert largest_difference(weights(first), weights(second)) == 0


def test_low_rank_state_is_refused_on_other_weights(directories: dict[str, Path], tmp_path: Path) -> None:
    """Additions belong to the weights that they were trained on, also where another model has the same shape."""
    other = write_model(tmp_path / "other", seed=1)
    assert (other / "config.json").read_bytes() == (directories["qwen3"] / "config.json").read_bytes()
    make_learner(other, lora=LORA).save_state(tmp_path / "state")
    with pytest.raises(InvalidState, match="another model"):
        make_learner(directories["qwen3"], lora=LORA).load_state(tmp_path / "state")


def test_additions_leave_their_reference_beneath_them(directories: dict[str, Path]) -> None:
    """The same losses as with a second model, which is not loaded."""
    objective = ObjectiveConfig(kl_coef=0.5, minibatches=2)
    learner = make_learner(directories["qwen3"], objective, lora=LORA)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    second = make_learner(directories["qwen3"], objective)._reference
    assert second is not None
    learner.step(sequences)  # moves the additions away from nothing
    assert learner._reference is not None
    for micro_batch in learner._split(sequences, range(len(sequences))):
        with torch.no_grad():
            beneath, with_additions = learner._reference(micro_batch), learner._policy(micro_batch)
            assert torch.equal(beneath, second(micro_batch))
        assert (beneath - with_additions).abs().max() > 1e-4
    names = [name for name, parameter in learner._policy.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in names)
    moved = weights(learner)
    learner.step(sequences)
    assert largest_difference(moved, weights(learner)) > 0


def test_a_base_in_half_precision_takes_half_the_memory_and_learns_the_same(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """With weights that bfloat16 holds exactly, as those of models that are published in it."""
    shutil.copytree(directories["qwen3"], tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    found = {}
    for base in ("float32", "bfloat16"):
        lora = LoraConfig(rank=2, alpha=4, base_dtype=base)
        learner = make_learner(tmp_path / "model", dtype="bfloat16", lora=lora)
        sequences = make_sequences()
        with_behavior(learner, sequences, noise=0.0)
        learner.supervised_step(sequences)
        found[base] = weights(learner)
        kinds = {name: value.dtype for name, value in found[base].items()}
        assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
        assert {kind for name, kind in kinds.items() if "lora_" not in name} == {getattr(torch, base)}
    added = [name for name in found["float32"] if "lora_B" in name]
    start = weights(make_learner(tmp_path / "model", lora=LoraConfig(rank=2, alpha=4)))
    moved = max(float((found["float32"][name] - start[name]).abs().max()) for name in added)
    apart = max(float((found["float32"][name] - found["bfloat16"][name]).abs().max()) for name in added)
    assert moved > 0
    assert apart < 0.1 * moved


def test_a_base_in_half_precision_is_refused_where_computing_is_not(directories: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"lora\.base_dtype"):
        make_learner(directories["qwen3"], lora=LoraConfig(rank=2, base_dtype="bfloat16"))


def test_the_reference_model_stays_where_training_started(directories: dict[str, Path]) -> None:
    objective = ObjectiveConfig(kl_coef=0.5, minibatches=2)
    learner = make_learner(directories["qwen3"], objective)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    first = learner.step(sequences)
    second = learner.step(sequences)
    assert first["gspo/kl_reference"] < second["gspo/kl_reference"]


def replaying_learner(model_dir: Path, *, replay: bool) -> Learner:
    objective = ObjectiveConfig(name="grpo", clip=[0.2, 0.27], minibatches=4)
    # a learning rate at which experts change within one batch
    return make_learner(model_dir, objective, optimizer=OptimizerConfig(lr=0.03), routing_replay=replay)


def chosen_experts(learner: Learner, sequences: list[TrainSequence]) -> list[torch.Tensor]:
    """What the experts really used in each forward pass with gradient of one step."""
    seen: list[torch.Tensor] = []

    def look(_: Any, given: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            seen.append(given[1].clone())

    handles = [
        module.register_forward_pre_hook(look)
        for module in learner._policy.modules()
        if type(module).__name__ == "Qwen3MoeExperts"
    ]
    learner.step(sequences)
    for handle in handles:
        handle.remove()
    return seen


def test_routing_replay_uses_the_experts_of_the_proximal_policy(directories: dict[str, Path]) -> None:
    model_dir = directories["qwen3 mixture"]
    sequences = make_sequences()
    with_behavior(make_learner(model_dir), sequences)
    frozen = make_learner(model_dir, optimizer=OptimizerConfig(lr=1e-30), objective=ObjectiveConfig(minibatches=4))
    proximal = chosen_experts(frozen, sequences)
    replayed = chosen_experts(replaying_learner(model_dir, replay=True), sequences)
    free = chosen_experts(replaying_learner(model_dir, replay=False), sequences)
    assert len(proximal) == len(replayed) == len(free) == 8  # two layers, four updates

    def differing(others: list[torch.Tensor]) -> int:
        return sum(int((first != second).sum()) for first, second in zip(proximal, others, strict=True))

    assert differing(free) > 0, "the test needs updates that change the experts"
    assert differing(replayed) == 0


def test_routing_replay_agrees_with_checkpointed_activations(directories: dict[str, Path]) -> None:
    model_dir, sequences = directories["qwen3 mixture"], make_sequences()
    with_behavior(make_learner(model_dir), sequences)
    objective = ObjectiveConfig(minibatches=3)
    plain = make_learner(model_dir, objective, routing_replay=True)
    checkpointed = make_learner(model_dir, objective, routing_replay=True, activation_checkpointing=True)
    plain.step(sequences)
    checkpointed.step(sequences)
    assert largest_difference(weights(plain), weights(checkpointed)) < 2e-6


def test_routing_replay_is_refused_without_routers(directories: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedRouter, match="Qwen3-MoE"):
        make_learner(directories["qwen3"], routing_replay=True)


@pytest.mark.parametrize("objective", [{"anchor": "behavior"}, {"minibatches": 1}])
def test_routing_replay_is_refused_where_it_cannot_act(directories: dict[str, Path], objective: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="proximal forward pass"):
        make_learner(directories["qwen3 mixture"], ObjectiveConfig(**objective), routing_replay=True)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [("Gemma2", {}, "final_logit_softcapping"), ("Cohere", {"logit_scale": 0.5}, "logit_scale")],
)
def test_heads_that_do_more_than_a_product_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    write_model(tmp_path, family, pad_token_id=0, bos_token_id=1, eos_token_id=2, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        make_learner(tmp_path)


def test_attention_that_packing_would_change_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"final_logit_softcapping": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    write_model(tmp_path, "Gemma2", **changes)
    with pytest.raises(UnsupportedModel, match=r"Gemma2Attention passes softcap.* cannot train it in any layout"):
        make_learner(tmp_path)


GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "changes", "layout", "refusal"),
    [
        ("GptOss", GPT_OSS, "shared", "s_aux.* cannot train it in any layout"),
        ("GptOss", GPT_OSS, "padded", "no layout can compute"),
        ("Mamba", {}, "packed", "cannot train it in any layout"),
        ("Mamba", {}, "padded", "no layout can compute"),
        ("Qwen3Next", {}, "shared", "own attention: set layout to padded"),
    ],
)
def test_a_refusal_advises_a_layout_only_where_it_helps(
    tmp_path: Path, family: str, changes: dict[str, Any], layout: str, refusal: str
) -> None:
    write_model(tmp_path, family, **changes)
    with pytest.raises(UnsupportedModel, match=refusal):
        make_learner(tmp_path, layout=layout)
    if "set layout to padded" in refusal:
        make_learner(tmp_path, layout="padded")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no Hugging Face model directory"):
        make_learner(tmp_path)


def test_a_supervised_step_lowers_the_loss_on_actions_alone(directories: dict[str, Path]) -> None:
    learner = make_learner(directories["qwen3"], optimizer=OptimizerConfig(lr=3e-3))
    sequences = make_sequences(8)
    num_actions = sum(s.num_actions for s in sequences)
    before = -sum(
        float(logprobs[s.action_mask].sum()) for s, logprobs in zip(sequences, learner.logprobs(sequences), strict=True)
    )
    first = learner.supervised_step(sequences)
    assert first["supervised/loss"] == pytest.approx(before / num_actions, rel=1e-5)
    for _ in range(20):
        last = learner.supervised_step(sequences)
    assert last["supervised/loss"] < first["supervised/loss"] - 0.5


def test_ids_outside_the_vocabulary_are_an_error(directories: dict[str, Path]) -> None:
    (sequence, *_) = make_sequences(1)
    ids = sequence.token_ids.copy()
    ids[-1] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError)):
        make_learner(directories["qwen3"]).logprobs([dataclasses.replace(sequence, token_ids=ids)])


def test_two_threads_never_load_at_once(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers exchanges its own methods meanwhile: loads whose ends cross would leave models untied for good."""
    load = transformers.AutoModelForCausalLM.from_config
    loading: list[str] = []
    crossed: list[list[str]] = []

    def watched(*args: Any, **options: Any) -> Any:
        loading.append(threading.current_thread().name)
        crossed.extend([loading.copy()] if len(loading) > 1 else [])
        if not threads[1].is_alive():
            threads[1].start()
            threads[1].join(0.5)  # long enough to come in, were it let in
        model = load(*args, **options)
        loading.pop()
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", watched)
    path = directories["qwen3 with tied embeddings"]
    threads = [threading.Thread(target=load_model, args=(path, "padded"), name=name) for name in ("first", "second")]
    threads[0].start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not crossed
