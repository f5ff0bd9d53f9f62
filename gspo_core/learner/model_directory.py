"""Reads Hugging Face model directories for training and writes ones that any engine loads.

One rule: apart from the weights, the output matches the starting model: same configuration (except the dtype), same
tokenizer, same chat template. It reads and writes safetensors only, downloads nothing, and neither runs nor copies
code. It does not handle versions or manifests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers.utils import logging as transformers_logging

from gspo_core.batch import Layout
from gspo_core.learner.attention import PACKED
from gspo_core.learner.policy import UnsupportedModel
from gspo_core.learner.skeleton import MissingWeights, Skeleton, fill, skeleton_of
from gspo_core.learner.weight_files import UnreadableWeights, WeightFiles
from gspo_core.log.layout import WEIGHTS_MANIFEST
from gspo_core.model_files import HEAD_SETTINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files copied besides the weights: configuration, tokenizer, chat template.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin.index.json")
_CONFIG = "config.json"

# transformers patches its own methods while loading. Overlapping loads can leave them patched for good, and then no
# model in the process ties its embedding to its head.
_LOADING = threading.Lock()


def load_model(model_dir: Path, layout: Layout) -> PreTrainedModel:
    """Load a causal language model with float32 weights in evaluation mode: policy and engine use no dropout."""
    source = open_model(model_dir)
    skeleton = make_skeleton(source, layout)
    fill_skeleton(source, skeleton, torch.device("cpu"))
    return skeleton.model


@dataclass(frozen=True)
class ModelSource:
    """A model directory with the headers of its weight files read."""

    model_dir: Path
    files: WeightFiles


def open_model(model_dir: Path) -> ModelSource:
    if not (model_dir / "config.json").is_file():
        raise UnsupportedModel(f"{model_dir} holds no config.json: it is no Hugging Face model directory")
    try:
        return ModelSource(model_dir, WeightFiles(model_dir))
    except UnreadableWeights as error:
        raise UnsupportedModel(str(error)) from error


def make_skeleton(source: ModelSource, layout: Layout, dtype: torch.dtype = torch.float32) -> Skeleton:
    """The model in evaluation mode on the meta device: no memory, no values."""
    try:
        with _LOADING, _without_progress_bars():
            config = transformers.AutoConfig.from_pretrained(
                source.model_dir, local_files_only=True, trust_remote_code=False
            )
            if getattr(config, "quantization_config", None):
                raise UnsupportedModel(f"the weights in {source.model_dir} are quantised; nothing here trains those")
            with torch.device("meta"):
                model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                    config,
                    dtype=dtype,
                    attn_implementation="sdpa" if layout == "padded" else PACKED,
                    trust_remote_code=False,
                )
            model.tie_weights()
    except ValueError as error:
        if layout == "padded" and "scaled_dot_product_attention" in str(error):
            raise UnsupportedModel(
                f"the model in {source.model_dir} has an attention that no layout can compute"
            ) from error
        raise
    _check_supported(model, layout)
    model.config.use_cache = False
    return skeleton_of(model.eval(), source.files)


def _check_supported(model: PreTrainedModel, layout: Layout) -> None:
    name = type(model).__name__
    if layout != "padded" and not model._supports_attention_backend:
        raise UnsupportedModel(f"{name} brings its own attention: {attention_advice(model)}")
    for key, neutral in HEAD_SETTINGS.items():
        if getattr(model.config, key, None) not in neutral:
            raise UnsupportedModel(f"{name} sets {key}, which the log-probs do not follow")


def fill_skeleton(source: ModelSource, skeleton: Skeleton, device: torch.device) -> None:
    """Read the weights (this rank's rows of them)."""
    try:
        fill(skeleton, source.files, device)
    except (MissingWeights, UnreadableWeights) as error:
        raise UnsupportedModel(f"{source.model_dir}: {error}") from error


def attention_advice(model: PreTrainedModel) -> str:
    """Advice for a model that cannot run with a packed layout."""
    if model._supports_sdpa:
        return "set layout to padded"
    return "this learner cannot train it in any layout, because torch's scaled-dot-product attention cannot compute it"


def export_share(model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path, rank: int) -> None:
    """Write one rank's share of `model`'s full tensors, on disk on return. Call `join_shares` next."""
    share = _share(directory, rank)
    share.mkdir(parents=True)
    # transformers saves only on the first rank
    model.should_save_on_this_rank = lambda is_main_process: True
    with _without_progress_bars():
        model.save_pretrained(share, state_dict=dict(tensors))
    for path in _weights(share):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def join_shares(directory: Path, num_ranks: int, *, source: Path, dtype: torch.dtype) -> None:
    """Join all ranks' shares into one model directory, with an index if there are several files, and add the small
    files of `source`. `dtype` is that of the tensors."""
    files = [path for rank in range(num_ranks) for path in _weights(_share(directory, rank))]
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, path in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(path, framework="pt") as opened:
            index["weight_map"] |= dict.fromkeys(opened.keys(), name)
        index["metadata"]["total_size"] += _size_of_tensors(path)
        path.rename(directory / name)
    if len(files) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in _share(directory, 0).iterdir():
        if not path.name.endswith(_WEIGHTS):
            path.rename(directory / path.name)
    for rank in range(num_ranks):
        shutil.rmtree(_share(directory, rank))
    _add_small_files(directory, source, dtype)


def _share(directory: Path, rank: int) -> Path:
    return directory / f"share-{rank:05d}"


def _weights(share: Path) -> list[Path]:
    """The weight files of a share, except empty ones (from a rank that owns no tensor)."""
    return [path for path in sorted(share.glob("*.safetensors")) if _holds_tensors(path)]


def _holds_tensors(path: Path) -> bool:
    with safe_open(path, framework="pt") as file:
        return bool(list(file.keys()))


def _size_of_tensors(path: Path) -> int:
    with path.open("rb") as file:  # the header follows its length
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _add_small_files(directory: Path, source: Path, dtype: torch.dtype) -> None:
    copy_small_files(directory, source)
    config = json.loads((source / _CONFIG).read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors makes files private; engines may run as another user


def copy_small_files(directory: Path, source: Path) -> None:
    """What of a model directory is neither weights nor its configuration: tokenizer, chat template. The manifest of a
    version that it was published as tells of other files."""
    for path in source.iterdir():
        is_small = path.suffix in _COPIED and not path.name.endswith(_WEIGHTS)
        if path.is_file() and is_small and path.name not in (_CONFIG, WEIGHTS_MANIFEST):
            shutil.copyfile(path, directory / path.name)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()
