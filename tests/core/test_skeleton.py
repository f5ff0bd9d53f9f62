"""Models are filled from files: the same values as transformers loads, and each rank its own rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo_core.learner import policy_model
from gspo_core.learner.model_directory import UnsupportedModel, load_model, make_skeleton, open_model
from gspo_core.learner.policy_model import PolicyModel
from gspo_core.learner.ranks import Ranks, local, rows_of
from gspo_core.learner.skeleton import fill
from gspo_core.learner.weight_files import WeightFiles
from tests.core.learner_support import MIXTURE, make_learner, write_model
from tests.core.test_learner_models import FAMILIES

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "mixture": ("Qwen3Moe", MIXTURE),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, family, **changes) for name, (family, changes) in MODELS.items()}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_model_is_the_one_that_transformers_loads(tmp_path: Path, family: str) -> None:
    name, changes = FAMILIES[family]
    write_model(tmp_path, name, **changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, "packed")
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    assert ours.get_output_embeddings().weight.requires_grad
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied


@contextmanager
def a_rank(rank: int, num_ranks: int) -> Iterator[Ranks]:
    """One of several ranks, whose collective calls go nowhere."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 2), (2, 4), (0, 8), (7, 8)])
def test_a_rank_reads_and_holds_its_rows_alone(
    directories: dict[str, Path], model: str, rank: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directories[model]
    expected = tensors_of(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    num_read = 0

    def counting(read: Any) -> Any:
        def counted(*given: Any) -> torch.Tensor:
            nonlocal num_read
            found: torch.Tensor = read(*given)
            num_read += found.numel()
            return found

        return counted

    for name in ("read", "read_rows"):
        monkeypatch.setattr(WeightFiles, name, counting(getattr(WeightFiles, name)))
    source = open_model(directory)
    with a_rank(rank, num_ranks) as ranks:
        skeleton = make_skeleton(source, "packed")
        policy = PolicyModel(skeleton.model, dtype=torch.float32, chunk_tokens=8)
        layers = policy_model._layers(skeleton.model)
        ranks.shard(policy, layers, dtype=torch.float32, device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in skeleton.model.parameters())
        fill(skeleton, source.files, torch.device("cpu"))
        held = 0
        for name, parameter in skeleton.model.named_parameters():
            first, end = rows_of(parameter)
            assert torch.equal(local(parameter.detach()), expected[name].detach()[first:end]), name
            held += local(parameter).numel()
        assert num_read == held
        assert held < 1.3 * sum(p.numel() for p in skeleton.model.parameters()) / num_ranks


def rewrite(directory: Path, change: Any) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def test_a_tensor_that_is_missing_is_refused_instead_of_made_up(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"hold no model\.layers\.1\.mlp\.up_proj\.weight"):
        make_learner(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has the shape \(7,\) in the files"):
        make_learner(tmp_path)


def test_a_mixture_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3Moe", **MIXTURE)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.5.down_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"its files make \(5, .*the model holds \(6, "):
        make_learner(tmp_path)


@pytest.mark.parametrize("cut", [4, 200, -10])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UnsupportedModel, match="cut short"):
        make_learner(tmp_path)


def test_half_precision_files_are_read_as_their_exact_values(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    kept = load_file(tmp_path / "model.safetensors")
    found = make_learner(tmp_path)._policy.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert found.dtype == torch.float32
    assert torch.equal(found.detach(), kept["model.layers.0.mlp.up_proj.weight"].float())
