"""Qwen3 in numpy, one token at a time: what an engine in a test computes with the weights that it was told to load.

For a model of a few kilobytes a forward pass of transformers is all overhead, and engines in tests ask for thousands.
What is said after a prefix is a function of weights and prefix alone, to the last bit: each token is read onto what its
own prefix left behind, never onto a longer batch. Written apart from the learner, so whoever compares the two compares
two implementations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Read:
    """What reading a prefix left behind."""

    keys: tuple[Array, ...]
    """Of each layer: position, head, size; values alike."""
    values: tuple[Array, ...]
    logprobs: Array
    """Of every token that may follow."""


class SmallQwen3:
    """The weights of a model directory. Float64 inside, whatever they are kept in."""

    def __init__(self, directory: Path) -> None:
        self._config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        files = sorted(directory.glob("*.safetensors"))
        tensors = {name: value for file in files for name, value in load_file(file).items()}
        self._weights: dict[str, Array] = {name: value.astype(np.float64) for name, value in tensors.items()}
        size: int = self._config["head_dim"]
        theta: float = self._config["rope_parameters"]["rope_theta"]
        self._frequencies: Array = theta ** -(np.arange(0, size, 2) / size)

    def read(self, before: Read | None, token_id: int) -> Read:
        num_layers: int = self._config["num_hidden_layers"]
        hidden, keys, values = self._weights["model.embed_tokens.weight"][token_id], list[Array](), list[Array]()
        for layer in range(num_layers):
            held = (before.keys[layer], before.values[layer]) if before else None
            attended, key, value = self._attend(layer, hidden, held)
            keys.append(key)
            values.append(value)
            hidden = self._mix(layer, hidden + attended)
        top = "model.embed_tokens.weight" if self._config["tie_word_embeddings"] else "lm_head.weight"
        logits = self._weights[top] @ self._normed("model.norm", hidden)
        logits -= logits.max()
        return Read(tuple(keys), tuple(values), logits - np.log(np.exp(logits).sum()))

    def _attend(self, layer: int, hidden: Array, held: tuple[Array, Array] | None) -> tuple[Array, Array, Array]:
        name, size = f"model.layers.{layer}.self_attn", self._config["head_dim"]
        normed = self._normed(f"model.layers.{layer}.input_layernorm", hidden)
        query, key, value = (
            (self._weights[f"{name}.{kind}_proj.weight"] @ normed).reshape(-1, size) for kind in ("q", "k", "v")
        )
        position = len(held[0]) if held else 0
        query = self._turned(self._normed(f"{name}.q_norm", query), position)
        key = self._turned(self._normed(f"{name}.k_norm", key), position)
        keys, values = (
            np.concatenate([old, new[None]]) if old is not None else new[None]
            for old, new in zip(held or (None, None), (key, value), strict=True)
        )
        shared = len(query) // len(key)  # queries to a key
        scores = np.einsum("hsd,phd->hsp", query.reshape(len(key), shared, size), keys) / np.sqrt(size)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hsp,phd->hsd", shares / shares.sum(-1, keepdims=True), values)
        return self._weights[f"{name}.o_proj.weight"] @ mixed.reshape(-1), keys, values

    def _mix(self, layer: int, hidden: Array) -> Array:
        name = f"model.layers.{layer}.mlp"
        normed = self._normed(f"model.layers.{layer}.post_attention_layernorm", hidden)
        gate = self._weights[f"{name}.gate_proj.weight"] @ normed
        up = self._weights[f"{name}.up_proj.weight"] @ normed
        mixed: Array = hidden + self._weights[f"{name}.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return mixed

    def _normed(self, name: str, values: Array) -> Array:
        scale = np.sqrt(np.mean(values**2, -1, keepdims=True) + self._config["rms_norm_eps"])
        normed: Array = values / scale * self._weights[f"{name}.weight"]
        return normed

    def _turned(self, heads: Array, position: int) -> Array:
        angles = position * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@lru_cache(maxsize=4)
def _model(weights: str) -> SmallQwen3:
    return SmallQwen3(Path(weights))


@lru_cache(maxsize=20_000)
def _read(weights: str, ids: bytes) -> Read:
    *_, newest = np.frombuffer(ids, np.int32).tolist()
    before = ids[: -np.dtype(np.int32).itemsize]
    return _model(weights).read(_read(weights, before) if before else None, newest)


def next_logprobs(weights: str, ids: Sequence[int] | bytes) -> Array:
    """Of every token that may follow ``ids``, which may be given as the bytes of their 32-bit integers."""
    return _read(weights, ids if isinstance(ids, bytes) else np.array(ids, np.int32).tobytes()).logprobs


def forget() -> None:
    """A directory may hold other weights from now on."""
    _read.cache_clear()
    _model.cache_clear()
