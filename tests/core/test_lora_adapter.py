"""A version that is an adapter stands for the whole version, bit for bit; whatever is not as it was published is
refused; and `peft` and transformers load it as their own."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gspo_core.learner import Learner, UnsupportedModel
from gspo_core.learner.low_rank import ADAPTER
from gspo_core.learner_config import LearnerConfig, LoraConfig
from gspo_core.lora_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGED_NAME,
    AdapterRefused,
    BaseWeights,
    merged_weights,
    name_base,
)
from services.files.weight_deltas import digest_in
from tests.core.learner_support import MIXTURE, make_learner, make_sequences, with_behavior, write_model

FILE = "model.safetensors"
KINDS: dict[str, dict[str, Any]] = {
    "all layers": {"lora": LoraConfig(rank=4, alpha=8)},
    "odd rank and scale": {"lora": LoraConfig(rank=3, alpha=0.7)},
    "some layers": {"lora": LoraConfig(rank=2, alpha=32, target_modules=("q_proj", "model.layers.1.mlp.down_proj"))},
    "bfloat16": {"lora": LoraConfig(rank=8), "dtype": "bfloat16"},
    "bfloat16, frozen too": {"lora": LoraConfig(rank=8, base_dtype="bfloat16"), "dtype": "bfloat16"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"lora": LoraConfig(rank=3, alpha=0.7, experts=True)},
    "experts in bfloat16": {"lora": LoraConfig(rank=8, experts=True), "dtype": "bfloat16"},
}
NUM_EACH = 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "base", "Qwen3Moe", **MIXTURE)


def draw(learner: Learner, seed: int, scale: float | None = None) -> None:
    """Additions as training could have made them, of a size that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    scale = scale or 10 ** float(torch.rand((), generator=generator) * 4 - 3)
    for name, parameter in learner._policy.named_parameters():
        if any(part in name for part in (f"lora_B.{ADAPTER}", f"lora_A.{ADAPTER}", "lora_A_", "lora_B_")):
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def published(model_dir: Path, directory: Path, seed: int = 0, **config: Any) -> Path:
    learner = make_learner(model_dir, publishes_adapter=True, **({"lora": LoraConfig(rank=4)} | config))
    draw(learner, seed, scale=0.2)
    learner.save_weights(directory)
    return directory


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("kind", [*KINDS, *EXPERTS])
def test_merged_it_is_what_the_whole_version_would_be(
    kind: str, model_dir: Path, mixture_dir: Path, tmp_path: Path
) -> None:
    options = (KINDS | EXPERTS)[kind]
    model_dir = mixture_dir if kind in EXPERTS else model_dir
    whole = make_learner(model_dir, **options)
    alone = make_learner(model_dir, publishes_adapter=True, **options)
    base, seen = BaseWeights(model_dir), set[str]()
    for seed in range(NUM_EACH):
        for learner, name in ((whole, "whole"), (alone, "adapter")):
            draw(learner, seed)
            learner.save_weights(tmp_path / f"{name}-{seed}")
        merged = merged_weights(base, tmp_path / f"adapter-{seed}")
        expected = load_file(tmp_path / f"whole-{seed}" / FILE)
        assert merged.keys() == expected.keys()
        assert all(same_bits(merged[name], expected[name]) for name in expected)
        said = json.loads((tmp_path / f"adapter-{seed}" / MERGED_NAME).read_text())
        assert said["digest"] == digest_in(tmp_path / f"whole-{seed}")
        seen.add(said["digest"])
        assert not (tmp_path / f"adapter-{seed}" / FILE).exists()
    assert len(seen) == NUM_EACH


def test_before_the_first_step_it_is_the_base(model_dir: Path, tmp_path: Path) -> None:
    make_learner(model_dir, lora=LoraConfig(), publishes_adapter=True).save_weights(tmp_path / "v0")
    merged = merged_weights(BaseWeights(model_dir), tmp_path / "v0")
    assert all(torch.equal(one, merged[name]) for name, one in load_file(model_dir / FILE).items())


def test_a_copy_is_of_the_moment_that_it_was_made(model_dir: Path, tmp_path: Path) -> None:
    """It is written while the next step is trained."""
    learner = make_learner(model_dir, lora=LoraConfig(rank=2), publishes_adapter=True)
    draw(learner, 1)
    learner.save_weights(tmp_path / "then")
    copy = learner.copy_weights()
    sequences = make_sequences(6)
    with_behavior(learner, sequences)
    learner.step(sequences)
    copy.write(tmp_path / "later")
    learner.save_weights(tmp_path / "now")
    content = [(tmp_path / name / ADAPTER_WEIGHTS).read_bytes() for name in ("then", "later", "now")]
    assert content[0] == content[1] != content[2]


# peft asks transformers by a name that transformers gives up
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["all layers", "some layers"])
def test_peft_and_transformers_load_it_as_their_own(kind: str, model_dir: Path, tmp_path: Path) -> None:
    directory = published(model_dir, tmp_path / "v1", seed=3, **KINDS[kind])
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(12)[None]
    plain, whole = load(model_dir).eval(), load(model_dir).eval()
    whole.load_state_dict(merged_weights(BaseWeights(model_dir), directory), strict=False)
    added = peft.PeftModel.from_pretrained(load(model_dir), directory).eval()
    names = {name for name, _ in added.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in names} == load_file(directory / ADAPTER_WEIGHTS).keys()
    with torch.no_grad():
        before, expected = plain(ids).logits, whole(ids).logits
        found = [added(ids).logits, load(directory).eval()(ids).logits, added.merge_and_unload()(ids).logits]
    assert (before - expected).abs().max() > 1e-3
    assert all((one - expected).abs().max() < 1e-4 for one in found)
    config = peft.LoraConfig.from_pretrained(directory)
    assert (config.base_model_name_or_path, config.r) == (str(model_dir), KINDS[kind]["lora"].rank)


def test_equal_additions_have_equal_files(model_dir: Path, tmp_path: Path) -> None:
    """A step that is trained again is compared by them. Only the place of the base may differ, and can be said."""
    elsewhere = shutil.copytree(model_dir, tmp_path / "elsewhere")
    left, right = published(model_dir, tmp_path / "left"), published(elsewhere, tmp_path / "right")
    assert digests(left) != digests(right)
    name_base(right, str(model_dir))
    assert digests(left) == digests(right)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        said = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(said | changes))

    return edit


def nudged(directory: Path) -> None:
    tensors = load_file(directory / ADAPTER_WEIGHTS)
    first = sorted(name for name in tensors if "lora_B" in name)[0]
    tensors[first][0, 0] += 1
    save_file(tensors, directory / ADAPTER_WEIGHTS)


def without_one(directory: Path) -> None:
    tensors = load_file(directory / ADAPTER_WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, directory / ADAPTER_WEIGHTS)


def cut_off(directory: Path) -> None:
    path = directory / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-7])


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an element": (nudged, "other bits"),
    "half of a pair": (without_one, "pairs"),
    "cut off": (cut_off, "cannot be read"),
    "another scale": (edited(ADAPTER_CONFIG, lora_alpha=7), "other bits"),
    "another rule": (edited(ADAPTER_CONFIG, use_rslora=True), "use_rslora"),
    "another kind": (edited(ADAPTER_CONFIG, peft_type="IA3"), "plain LoRA"),
    "no rank": (edited(ADAPTER_CONFIG, r=0), "damaged"),
    "another format": (edited(MERGED_NAME, format=2), "format 2"),
    "no config": (lambda directory: (directory / ADAPTER_CONFIG).unlink(), "cannot be read"),
    "no digest": (lambda directory: (directory / MERGED_NAME).unlink(), "cannot be read"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_not_as_it_was_published_is_refused(how: str, model_dir: Path, tmp_path: Path) -> None:
    directory = published(model_dir, tmp_path / "v1")
    merged_weights(BaseWeights(model_dir), directory)
    spoil, message = SPOILED[how]
    spoil(directory)
    with pytest.raises(AdapterRefused, match=message):
        merged_weights(BaseWeights(model_dir), directory)


def test_another_base_is_refused(model_dir: Path, tmp_path: Path) -> None:
    directory = published(model_dir, tmp_path / "v1")
    other = write_model(tmp_path / "other", seed=1, tie_word_embeddings=True)
    with pytest.raises(AdapterRefused, match="is not the base"):
        merged_weights(BaseWeights(other), directory)
    with pytest.raises(AdapterRefused, match="cannot be read"):
        BaseWeights(tmp_path / "nowhere")


def test_a_base_of_several_files_is_one(model_dir: Path, tmp_path: Path) -> None:
    directory = published(model_dir, tmp_path / "v1")
    pieces = tmp_path / "pieces"
    transformers.AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(pieces, max_shard_size="20KB")
    assert len(list(pieces.glob("*.safetensors"))) > 2
    whole, cut = (merged_weights(BaseWeights(one), directory) for one in (model_dir, pieces))
    assert all(same_bits(whole[name], cut[name]) for name in whole)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_layer_that_shares_its_weight_is_refused_at_the_start(model_dir: Path) -> None:
    """Over the files the addition to the head would not reach the embedding, or there is no such tensor."""
    lora = LoraConfig(target_modules=("lm_head",))
    with pytest.raises(UnsupportedModel, match=r"shares its weight .*weight_transport disk"):
        make_learner(model_dir, lora=lora, publishes_adapter=True)


def test_additions_to_what_the_files_do_not_hold_are_refused(model_dir: Path) -> None:
    """As where transformers makes one tensor of several."""
    base = BaseWeights(model_dir)
    base.check_targets(["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(AdapterRefused, match=r"hold no model\.layers\.0\.mlp\.experts\.weight"):
        base.check_targets(["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.weight"])


def test_without_additions_none_are_published() -> None:
    with pytest.raises(ValueError, match="publishes_adapter"):
        LearnerConfig(publishes_adapter=True)
