"""Looks at a model directory without loading it: are the files there, and does its configuration rule training out?

Rule: it reads names and one small file, so any process can ask at any time. It names what is certain to fail; whether
the weights load and the chat format fits, only loading tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# Settings that change the head's output in ways that no log-probs here follow, with their neutral values.
HEAD_SETTINGS: Mapping[str, tuple[int | None, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
}


def problem_of(model_dir: Path) -> str | None:
    """Why no job can train this model; None if nothing speaks against it."""
    try:
        if not model_dir.is_dir():
            return f"there is no directory {model_dir}"
        names = {path.name for path in model_dir.iterdir()}
        missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
        if missing:
            return f"{model_dir} holds no {' and no '.join(missing)}: it is no Hugging Face model directory"
        if not any(name.endswith(".safetensors") for name in names):
            return f"{model_dir} holds no *.safetensors, and no other format of weights is read"
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{model_dir} cannot be read: {error}"
    return config_problem(config) if isinstance(config, dict) else f"{model_dir}/config.json holds no object"


def config_problem(config: Mapping[str, object]) -> str | None:
    """Why no job can train a model of this configuration."""
    if not isinstance(config.get("model_type"), str):
        return "its config.json does not say model_type"
    for name, neutral in HEAD_SETTINGS.items():
        if config.get(name) not in neutral:
            return f"{config['model_type']} sets {name}, which the log-probs do not follow"
    return None
