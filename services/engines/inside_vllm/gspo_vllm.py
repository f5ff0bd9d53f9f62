"""Loads weights inside a vLLM worker: checked before anything is replaced, and whole afterwards.

Named to vLLM by ``--worker-extension-cls gspo_vllm.WeightsFromFolder``. It imports nothing but the standard library,
and what goes through ``/collective_rpc`` is JSON: a path in, a finding out.
Rule: a folder with other tensors than the engine's is refused while the old weights serve on. It does not pause, label
or flush.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

Shapes = dict[str, list[int]]
_MAX_HEADER_BYTES = 100_000_000
_HEAD = "lm_head.weight"
"""Some checkpoints have it although their model reads the embedding in its place. Trainers publish one of the two."""


class _Config(Protocol):
    model: str
    hf_text_config: Any


class _Model(Protocol):
    def modules(self) -> Iterable[Any]: ...


class _Worker(Protocol):
    """What vLLM's worker offers; a class mixed into it must not have the same names."""

    model_config: _Config
    gspo_shapes: Shapes | None

    def get_model(self) -> _Model: ...

    def reload_weights(self, *, weights_path: str) -> None: ...


class WeightsFromFolder:
    """Mixed into vLLM's worker."""

    gspo_shapes: Shapes | None = None
    """From the folder that the engine started with; if that was a name of the hub, from the first one loaded."""

    def gspo_greet(self) -> dict[str, str]:
        """Lets a caller see that this extension is loaded."""
        return {"refused": ""}

    def gspo_load(self: _Worker, path: str) -> dict[str, str]:
        """``refused``: why nothing was replaced, or empty. Anything raised leaves unknown weights."""
        try:
            found = shapes_in(Path(path))
            if self.gspo_shapes is None:
                start = Path(self.model_config.model)  # or a name of the hub, which the first folder stands for
                self.gspo_shapes = shapes_in(start) if start.is_dir() else found
            is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            problem = difference(self.gspo_shapes, found, ignored=(_HEAD,) if is_tied else ())
        except (OSError, ValueError, KeyError) as error:
            problem = f"cannot be read: {error}"
        if problem:
            return {"refused": f"{path} {problem}"}
        self.reload_weights(weights_path=path)
        _pack_tied_heads(self.get_model())
        return {"refused": ""}


def difference(ours: Shapes, found: Shapes, ignored: Collection[str] = ()) -> str:
    """The first tensor in which they differ, in words; empty if there is none."""
    for name in sorted((ours.keys() | found.keys()).difference(ignored)):
        if ours.get(name) != found.get(name):
            return f"has {name} {found.get(name)}, the engine's model {ours.get(name)}"
    return ""


def shapes_in(folder: Path) -> Shapes:
    """The tensors of a model's folder, by the headers of its files. Raises OSError, ValueError, KeyError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("no *.safetensors there")
    found: Shapes = {}
    for file in files:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", _exactly(opened.read(8), 8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"{file.name} has a header of {size} bytes")
            header = json.loads(_exactly(opened.read(size), size))
        found |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return found


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("a file ends early")
    return data


def _pack_tied_heads(model: _Model) -> None:
    """On a CPU vLLM multiplies by packed copies of weights, and a reload leaves out that of a head which shares the
    embedding's: it would go on with the old ones.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
