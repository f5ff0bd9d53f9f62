"""What a plan says is what the learner does: shapes, saved tensors, settings, refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import learner_fake
from benchmarks.model_shapes import QWEN3
from gspo_core.batch import TrainSequence, balance, collate
from gspo_core.cli import main
from gspo_core.learner import policy_model, training
from gspo_core.learner.context import ContextRanks
from gspo_core.learner.fitting import DoesNotFit, settled_at
from gspo_core.learner.model_directory import fill_skeleton, make_skeleton, open_model
from gspo_core.learner.narrow import compute_in
from gspo_core.learner.policy_model import PolicyModel
from gspo_core.learner.ranks import Ranks, local
from gspo_core.learner_config import LearnerConfig, LearnerOptions, LoraConfig
from gspo_core.plan import (
    LearnerPlace,
    Setting,
    UnknownShape,
    checkpoint_bytes,
    choose,
    parse_machines,
    plan_memory,
    read_shape,
    refusal,
    shape_of,
)
from gspo_core.plan.passes import kept_bytes, layer_bytes
from gspo_core.plan.setting import KEYS_PER_TOKEN, layer_size
from gspo_core.plan.step_time import Work, predict_step
from tests.core.learner_support import MIXTURE, make_learner, make_sequences, write_model

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 8, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", SHAPE),
    "qwen3, tied": ("Qwen3", {**SHAPE, "tie_word_embeddings": True}),
    "qwen3 mixture": ("Qwen3Moe", {**SHAPE, **MIXTURE, "moe_intermediate_size": 40}),
    "qwen3 mixture with dense layers": ("Qwen3Moe", {**SHAPE, **MIXTURE, "decoder_sparse_step": 2}),
    "llama": ("Llama", SHAPE),
    "mistral": ("Mistral", SHAPE),
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_model(root / str(number), family, **changes)
        for number, (name, (family, changes)) in enumerate(FAMILIES.items())
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shapes_are_those_of_the_model(directories: dict[str, Path], family: str) -> None:
    directory = directories[family]
    shape = read_shape(directory)
    planned = dict(shape.root())
    for number in range(shape.num_layers):
        planned |= {f"model.layers.{number}.{name}": one for name, one in shape.layer(number).items()}
    model = make_skeleton(open_model(directory), "packed").model
    assert planned == {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def a_sequence(length: int) -> TrainSequence:
    acts, zeros = np.arange(length) > 0, np.zeros(length, np.int32)
    return TrainSequence(np.arange(length) % 61, acts, np.zeros(length), zeros, zeros, advantages=1.0)


def saved_bytes(
    directory: Path,
    length: int,
    dtype: torch.dtype,
    *,
    is_checkpointed: bool = False,
    context: ContextRanks | None = None,
) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage once, beside weights."""
    source = open_model(directory)
    skeleton = make_skeleton(source, "packed")
    policy = PolicyModel(skeleton.model, dtype=dtype, chunk_tokens=64, context=context)
    fill_skeleton(source, skeleton, torch.device("cpu"))
    if is_checkpointed:
        policy_model._checkpoint_activations(skeleton.model)
    if dtype != torch.float32:
        compute_in(skeleton.model, dtype)
    batch = collate([a_sequence(length)], [0], layout="packed")
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_the_backward_pass_keeps(
    directories: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    """The difference of two lengths: copies of weights do not grow with them."""
    directory = directories[family]
    short, long = (saved_bytes(directory, length, dtype) for length in (100, 200))
    setting = Setting(read_shape(directory), device="cpu", is_half=dtype == torch.bfloat16, tokens=100)
    assert kept_bytes(setting) == pytest.approx(long - short, rel=0.025)


def test_recomputed_layers_keep_their_inputs_alone(directories: dict[str, Path]) -> None:
    directory = directories["qwen3"]
    short, long = (saved_bytes(directory, length, torch.float32, is_checkpointed=True) for length in (100, 200))
    setting = Setting(read_shape(directory), device="cpu", is_half=False, tokens=100, is_checkpointed=True)
    assert kept_bytes(setting) == pytest.approx(long - short, rel=0.05)  # rotations, which all layers share, are more


@pytest.mark.parametrize(("family", "size"), [("qwen3", 2), ("qwen3", 8), ("qwen2", 4), ("qwen3 mixture", 2)])
def test_ranks_that_share_tokens_keep_their_part(directories: dict[str, Path], family: str, size: int) -> None:
    """Eight ranks have a head each; with two heads of keys each of those is there four times."""
    directory = directories[family]
    with a_rank_of(size):
        context = ContextRanks(dist.distributed_c10d._get_default_group(), 0, size)
        short, long = (saved_bytes(directory, length, torch.float32, context=context) for length in (160, 320))
    setting = Setting(read_shape(directory), device="cpu", is_half=False, tokens=160, context=size)
    assert kept_bytes(setting) == pytest.approx(long - short, rel=0.03)


@contextmanager
def a_rank_of(num_ranks: int) -> Iterator[Ranks]:
    """The first of several ranks, whose collective calls go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (3, 1), (8, 1), (8, 2)])
def test_the_first_rank_holds_what_is_planned(
    directories: dict[str, Path], family: str, num_ranks: int, replicas: int
) -> None:
    shape = read_shape(directories[family])
    skeleton = make_skeleton(open_model(directories[family]), "packed")
    policy = PolicyModel(skeleton.model, dtype=torch.float32, chunk_tokens=8)
    with a_rank_of(num_ranks) as current:
        ranks = current.arranged(LearnerOptions(replicas=replicas))
        ranks.shard(policy, policy_model._layers(skeleton.model), dtype=torch.float32, device=torch.device("cpu"))
        held = sum(local(parameter).numel() for parameter in policy.parameters())
    setting = Setting(shape, num_ranks=num_ranks, replicas=replicas, device="cpu", is_half=False)
    load = plan_memory(setting)[0]
    assert load.on_device["weights"] == 4 * held


@pytest.mark.parametrize(
    ("family", "rank"), [*((one, None) for one in FAMILIES), ("qwen3", 4), ("llama", 4), ("qwen3 mixture", 4)]
)
def test_a_checkpoint_takes_at_most_what_is_planned(
    directories: dict[str, Path], tmp_path: Path, family: str, rank: int | None
) -> None:
    learner = make_learner(directories[family], lora=None if rank is None else LoraConfig(rank=rank))
    learner.step(make_sequences(4))
    learner.save_state(tmp_path / "state")
    taken = sum(path.stat().st_size for path in (tmp_path / "state").iterdir())
    planned = checkpoint_bytes(read_shape(directories[family]), rank)
    num_trained = sum(one.numel() for one in learner._policy.parameters() if one.requires_grad)
    assert 12 * num_trained < taken < planned
    assert planned - taken < 700 * len(list(learner._policy.parameters())) + 16_384


def test_the_page_says_what_checkpoints_of_a_large_model_take() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "time-machine.md").read_text().split())
    whole, additions = (checkpoint_bytes(shape_of(QWEN3_8B), rank) / 1e9 for rank in (None, 16))
    assert f"For Qwen3-8B that is {whole:.0f} GB each time" in page
    assert f"of rank 16 {additions:.2f} GB" in page


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_a_rank_that_recomputes_holds_at_most_what_is_planned(model: str) -> None:
    """By torch's own accountant over tensors without data; small, so that any moment may be highest."""
    config = learner_fake.config_of(model, 3)
    peaks = learner_fake.tracked(config, 8, 2048, is_checkpointed=True)
    plan = learner_fake.planned(config, 8, 2048, is_checkpointed=True)
    for phase, found in peaks.items():
        assert found["Total"] * 0.98 < plan[phase] < found["Total"] * 1.12, phase


def place(gib: float, *, num_ranks: int = 8, **more: Any) -> LearnerPlace:
    return LearnerPlace(num_ranks, "cuda", int(gib * 2**30), **more)


EIGHT_B = shape_of(QWEN3_8B)


def test_with_room_nothing_is_recomputed_and_with_less_it_is() -> None:
    plenty = choose(EIGHT_B, LearnerOptions(), place(190))
    less = choose(EIGHT_B, LearnerOptions(), place(73))
    scarce = choose(EIGHT_B, LearnerOptions(activation_checkpointing="auto"), place(30))
    assert (plenty.activation_checkpointing, plenty.micro_batch_tokens) == (False, 16_384)
    assert (less.activation_checkpointing, less.micro_batch_tokens) == (False, 4_096)
    assert (scarce.activation_checkpointing, scarce.fits) == (True, True)


def test_room_is_left_for_the_longest_sequence() -> None:
    found = choose(EIGHT_B, LearnerOptions(), place(73, longest=32_768))
    assert (found.activation_checkpointing, found.micro_batch_tokens) == (True, 32_768)


def test_a_sequence_that_is_too_long_is_shared_by_ranks() -> None:
    alone = choose(EIGHT_B, LearnerOptions(), place(70, longest=200_000))
    shared = choose(EIGHT_B, LearnerOptions(context_parallel=8), place(70, longest=200_000))
    assert (alone.fits, shared.fits, shared.micro_batch_tokens) == (False, True, 200_000)
    assert "learner.context_parallel: 4" in refusal(alone, LearnerOptions(), place(70, longest=200_000))
    short = choose(EIGHT_B, LearnerOptions(context_parallel=2), place(190))
    assert short.micro_batch_tokens == 2 * 16_384


def test_copies_of_the_model_take_more_of_each_rank() -> None:
    one, two = (choose(EIGHT_B, LearnerOptions(replicas=number), place(80)) for number in (1, 2))
    assert two.phases[-1].device_total == pytest.approx(2 * one.phases[-1].device_total, rel=1e-3)
    options = LearnerOptions(replicas=4)
    assert "learner.replicas" in refusal(choose(EIGHT_B, options, place(40)), options, place(40))


def test_copies_gather_within_machines() -> None:
    """The weights of one copy stay on a machine; only gradients cross."""
    machines = parse_machines("16xH100")
    work = Work(num_tokens=500_000, mean_length=4000, minibatches=4, has_proximal=True, has_reference=False)
    one, two = (predict_step(Setting(EIGHT_B, 16, replicas=number), work, machines).gather_s for number in (1, 2))
    assert two < one / 3


def test_what_is_set_stays(directories: dict[str, Path]) -> None:
    options = LearnerOptions(activation_checkpointing=False, micro_batch_tokens=16_384)
    found = choose(EIGHT_B, options, place(73))
    assert (found.activation_checkpointing, found.micro_batch_tokens, found.fits) == (False, 16_384, False)
    config = LearnerConfig(activation_checkpointing=True, micro_batch_tokens=100)
    assert settled_at(directories["qwen3"], config, place(10)) == config


def test_what_cannot_fit_is_refused_with_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(DoesNotFit, match=r"needs [\d.]+ GiB on each of 1 ranks.*8 ranks of this kind.*learner\.lora"):
        settled_at(tmp_path, LearnerConfig(), place(40, num_ranks=1))
    with pytest.raises(DoesNotFit, match=r"set learner\.micro_batch_tokens to auto"):
        settled_at(tmp_path, LearnerConfig(micro_batch_tokens=1_000_000), place(73))


def test_nothing_is_loaded_of_what_cannot_fit(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_small_gpu(model_dir: Path, config: LearnerConfig, *_: object, **__: object) -> LearnerConfig:
        return settled_at(model_dir, config, place(0.0001, num_ranks=1))

    monkeypatch.setattr(training, "settled", on_a_small_gpu)
    monkeypatch.setattr(training, "load_policy", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(DoesNotFit):
        make_learner(directories["qwen3"])


def test_on_a_cpu_auto_is_what_the_defaults_were(directories: dict[str, Path]) -> None:
    learner = make_learner(directories["qwen3"], layout="auto")
    found = learner._settled
    assert (found.micro_batch_tokens, found.activation_checkpointing, found.layout) == (16_384, False, "shared")


def test_an_unknown_family_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(UnknownShape, match="not for other"):
        read_shape(tmp_path)
    found = settled_at(tmp_path, LearnerConfig(), place(73))
    assert found.activation_checkpointing is True


def job_file(tmp_path: Path, **learner: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    path = tmp_path / "job.json"
    environments = [{"ref": "environments.calculator:Calculator"}]
    path.write_text(json.dumps({"model": str(tmp_path), "environments": environments, "steps": 1, "learner": learner}))
    return path


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job_file(tmp_path)), "--gpus", "8xH100"]) == 0
    said = capsys.readouterr().out
    for part in ("8.19 billion parameters", "forward and backward", "moments", "it fits", "s without rollouts"):
        assert part in said
    assert main(["plan", str(job_file(tmp_path)), "--gpus", "1xH100", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert "4 ranks of this kind would do" in found["refusal"]


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"context_parallel": 3}, "does not divide the number of ranks, 8"),
        ({"replicas": 8}, "leave one rank to each"),
        ({"context_parallel": 8, "replicas": 2}, "2 copies of the model, each on 4 ranks"),
        ({"context_parallel": 8}, "each is shared by 8 ranks"),
    ],
)
def test_the_command_knows_how_ranks_are_divided(
    tmp_path: Path, learner: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", str(job_file(tmp_path, **learner)), "--gpus", "8xH200"])
    assert said in capsys.readouterr().out
    assert code == (1 if "divide" in said or "leave" in said else 0)


@pytest.mark.parametrize("gpus", ["0xH100", "8xT1000", "eight", "8x"])
def test_gpus_that_are_none_are_refused(tmp_path: Path, gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job_file(tmp_path)), "--gpus", gpus]) == 1
    assert "such as 8x" in capsys.readouterr().err


def test_gpus_may_be_given_by_their_memory() -> None:
    assert parse_machines("4x96GiB").device.memory_bytes == 96 * 2**30
    assert parse_machines("h100").num_devices == 1


def test_a_reference_takes_a_second_model_unless_additions_are_trained() -> None:
    def held(**more: Any) -> int:
        setting = Setting(EIGHT_B, num_ranks=8, **more)
        return plan_memory(setting)[-1].device_total

    assert held(has_reference=True) - held() == pytest.approx(4 * 8.19e9 / 8, rel=0.01)
    assert held(has_reference=True, lora_rank=16) == held(lora_rank=16)
    assert held(lora_rank=16) - held(lora_rank=16, is_base_half=True) == pytest.approx(2 * 8.19e9 / 8, rel=0.01)


MANY_HEADS: dict[str, Any] = {**QWEN3_8B, "model_type": "llama", "num_key_value_heads": 32, "intermediate_size": 11008}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", QWEN3)
def test_keys_that_heads_share_take_less_than_the_tokens_that_they_are_counted_for(
    name: str, is_checkpointed: bool
) -> None:
    setting = Setting(shape_of(QWEN3[name]), is_checkpointed=is_checkpointed)
    shared = dataclasses.replace(setting, shares_beginnings=True)
    assert plan_memory(shared) == plan_memory(setting)


def test_keys_that_no_heads_share_take_more() -> None:
    """A micro-batch full of keys, beside one full of tokens."""
    shape = shape_of(MANY_HEADS)
    found = choose(shape, LearnerOptions(), place(190))
    kinds = found.phases[1].on_device
    a_token = layer_bytes(found.setting, 0)
    keys = KEYS_PER_TOKEN * 2 * 32 * 128 * 2
    assert kinds["gathered keys"] == (keys - a_token) * 36 * found.micro_batch_tokens
    assert "gathered keys" not in choose(shape, LearnerOptions(layout="packed"), place(190)).phases[1].on_device


def test_the_plan_counts_gathered_keys_as_the_learner_fills_its_micro_batches() -> None:
    assert KEYS_PER_TOKEN == balance.KEYS_PER_TOKEN


def test_gloo_makes_a_copy_of_what_it_gathers() -> None:
    """Measured: 64 MiB more for 64 MiB (benchmarks/results/learner_memory.md)."""
    cpu, gpu = (plan_memory(Setting(EIGHT_B, num_ranks=4, device=one, is_half=False)) for one in ("cpu", "cuda"))
    layer = 4 * layer_size(EIGHT_B)
    assert cpu[0].device_total - gpu[0].device_total == layer
    assert cpu[3].device_total - gpu[3].device_total == 4 * EIGHT_B.vocabulary * EIGHT_B.hidden
    alone = plan_memory(Setting(EIGHT_B, device="cpu", is_half=False))
    assert "gathered for the forward check" not in alone[0].on_device
