"""Models with random weights in the shapes of published ones, written once for all parts of a run.

A block of random numbers is repeated, since drawing eight billion takes minutes on a CPU: their values matter to
nothing that is measured with them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu.check import Place
from benchmarks.model_shapes import QWEN3
from gspo_core.batch import TrainSequence

TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BLOCK = 2**20
SPREAD = 0.02
MOST_BYTES = 4 * 2**30
"""Of a file."""


def shape_of_model(name: str, *, is_toy: bool) -> dict[str, Any]:
    return {**QWEN3[name], **TOY} if is_toy else QWEN3[name]


def model_at(place: Place, name: str) -> Path:
    """Its directory, in bfloat16."""
    directory = place.models / name
    if not directory.exists():
        half = place.models / f".{name}.half"
        shutil.rmtree(half, ignore_errors=True)
        _make(half, shape_of_model(name, is_toy=place.is_toy))
        os.replace(half, directory)
    return directory


def _make(directory: Path, shape: dict[str, Any]) -> None:
    import transformers

    named = {key: value for key, value in shape.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(
        shape["model_type"], **named, max_position_embeddings=40_960, bos_token_id=0, eos_token_id=1, pad_token_id=0
    )
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    directory.mkdir(parents=True)
    _write(directory, {key: tuple(value.shape) for key, value in model.named_parameters()})
    config.dtype = "bfloat16"
    config.save_pretrained(directory)


def _write(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    block = (torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * SPREAD).bfloat16()
    files: list[dict[str, torch.Tensor]] = [{}]
    room = MOST_BYTES
    for name, shape in shapes.items():
        number = math.prod(shape)
        if 2 * number > room and files[-1]:
            files.append({})
            room = MOST_BYTES
        room -= 2 * number
        one = block.repeat(-(-number // BLOCK))[:number].reshape(shape)
        files[-1][name] = one + 1 if len(shape) == 1 else one.contiguous()
    names = [f"model-{place + 1:05d}-of-{len(files):05d}.safetensors" for place in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, directory / name, metadata={"format": "pt"})
    weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    index = {"metadata": {"total_size": 2 * sum(map(math.prod, shapes.values()))}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def sequences_of(number: int, length: int, vocabulary: int, *, prompt_share: float = 0.25) -> list[TrainSequence]:
    """Groups of eight that share a prompt, of one length each: what a step at that length looks like at its longest."""
    rng = np.random.default_rng(length)
    found, prompt = [], np.zeros(0, np.int32)
    for place in range(number):
        if place % 8 == 0:
            prompt = rng.integers(2, vocabulary, int(length * prompt_share), dtype=np.int32)
        answer = rng.integers(2, vocabulary, length - len(prompt), dtype=np.int32)
        acts, zeros = np.arange(length) >= max(1, len(prompt)), np.zeros(length, np.int32)
        behavior = np.full(length, -math.log(vocabulary), np.float32)
        advantage = 1.0 if place % 2 else -1.0
        found.append(TrainSequence(np.concatenate([prompt, answer]), acts, behavior, zeros, zeros, advantage))
    return found
