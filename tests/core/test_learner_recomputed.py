"""What is recomputed in the backward pass, and compiled layers: the same results, or a refusal by name."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_core.batch import collate
from gspo_core.learner import UnsupportedModel
from gspo_core.learner.policy_model import _checkpoint_activations
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.plan import Setting, read_shape
from gspo_core.plan.passes import kept_bytes
from tests.core.learner_support import (
    LINEAR,
    MIXTURE,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)
from tests.core.test_plan import a_sequence

COMPILED_BOUND = 1e-3
"""Of what the weights have moved by."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_model(root / "dense", hidden_size=64),
        "mixture": write_model(root / "mixture", "Qwen3Moe", **MIXTURE),
    }


def trained(model_dir: Path, **options: Any) -> dict[str, torch.Tensor]:
    learner = make_learner(model_dir, ObjectiveConfig(minibatches=2), optimizer=LINEAR, **options)
    sequences = make_sequences(8)
    with_behavior(learner, sequences)
    for _ in range(2):
        learner.step(sequences)
    return weights(learner)


@pytest.mark.parametrize("options", [{}, {"layout": "padded"}, {"routing_replay": True}], ids=str)
def test_keeping_attention_changes_no_bit(directories: dict[str, Path], options: dict[str, Any]) -> None:
    model_dir = directories["mixture" if options.get("routing_replay") else "dense"]
    whole, partly = (trained(model_dir, activation_checkpointing=one, **options) for one in (True, "keep_attention"))
    assert largest_difference(whole, partly) == 0


class Kernel:
    """How often attention is computed, forward and backward pass together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        with torch.no_grad():
            self._watch = _Counting(self)

    def __enter__(self) -> Kernel:
        self._watch.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self._watch.__exit__(*given)


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self._kernel.calls += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def num_attentions(model_dir: Path, checkpointing: bool | str, monkeypatch: pytest.MonkeyPatch) -> int:
    learner = make_learner(model_dir, activation_checkpointing=checkpointing)
    batch = collate([a_sequence(40)], [0], layout="packed")
    with Kernel(monkeypatch) as kernel:
        learner._policy(batch).sum().backward()
    return kernel.calls


def test_attention_is_computed_once_where_it_is_kept(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [num_attentions(directories["dense"], one, monkeypatch) for one in (False, True, "keep_attention")]
    assert found == [2, 4, 2]


def live_bytes(model_dir: Path, length: int, *, keeps_attention: bool) -> int:
    """Of the tensors that a forward pass leaves to Python: inputs of layers, and what was kept of them."""
    learner = make_learner(model_dir)
    _checkpoint_activations(learner._policy.model, keeps_attention=keeps_attention)
    batch = collate([a_sequence(length)], [0], layout="packed")
    gc.collect()
    before = storages()
    found = learner._policy(batch)
    gc.collect()
    assert found.requires_grad
    return sum(size for pointer, size in storages().items() if pointer not in before)


def storages() -> dict[int, int]:
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def test_the_plan_counts_what_is_kept_of_attention(directories: dict[str, Path]) -> None:
    shape = read_shape(directories["dense"])
    kept = [
        live_bytes(directories["dense"], length, keeps_attention=keeps)
        for keeps in (True, False)
        for length in (300, 100)
    ]
    planned = [
        kept_bytes(Setting(shape, device="cpu", is_half=False, tokens=200, is_checkpointed=True, keeps_attention=one))
        for one in (True, False)
    ]
    assert (kept[0] - kept[1]) - (kept[2] - kept[3]) == pytest.approx(planned[0] - planned[1], rel=0.01)


def test_compiling_without_a_compiler_is_refused_by_name(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.reset()  # or what another test has compiled is taken
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    refused = pytest.raises(UnsupportedModel, match=r"learner\.compile_layers: nothing can be compiled .*cpp\.cxx")
    with torch._inductor.config.patch({"cpp.cxx": (None, "a-compiler-that-is-not-there")}), refused:
        make_learner(directories["dense"], compile_layers=True)


def test_compiling_in_half_precision_is_refused_on_one_rank(directories: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"learner\.compile_layers: one rank compiles in float32 alone"):
        make_learner(directories["dense"], compile_layers=True, dtype="bfloat16")


# A minute of compiling each.
@pytest.mark.slow
@pytest.mark.timeout(900)
# dynamo itself looks at every tensor that it is given
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {}),
        ("dense", {"activation_checkpointing": "keep_attention"}),
        ("mixture", {}),
    ],
    ids=str,
)
def test_compiled_layers_learn_the_same(directories: dict[str, Path], model: str, options: dict[str, Any]) -> None:
    eager = trained(directories[model], **options)
    compiled = trained(directories[model], compile_layers=True, **options)
    moved = largest_difference(weights(make_learner(directories[model])), eager)
    assert 0 < largest_difference(eager, compiled) < COMPILED_BOUND * moved
