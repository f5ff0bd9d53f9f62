"""Writing a model as a plain Hugging Face directory that any engine loads.

One rule: besides the weights, the directory is the one that training started from: same configuration (but for the
dtype), same tokenizer, same chat template. Code is never copied. It knows no versions and no manifest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What a model directory may hold besides weights: configuration, tokenizer, chat template.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin.index.json")


def export_model(
    model: Any, tensors: Mapping[str, Tensor], directory: Path, *, source: Path, dtype: torch.dtype
) -> None:
    """Write `tensors` (those of `model`, whole, in `dtype`) and the small files of `source` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, state_dict=dict(tensors))
    for path in source.iterdir():
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, directory / path.name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
