"""Looks at a model directory without loading it: are the files there, and does its configuration rule training out?

Rule: it reads names and small files, so any process can ask at any time. It names what is certain to fail; whether the
weights load and the chat format fits, only loading tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

# Settings that change the head's output in ways that no log-probs here follow, with their neutral values.
HEAD_SETTINGS: Mapping[str, tuple[int | None, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
}
# Set for models whose messages may hold more than text: no environment, template or engine call here carries that.
OTHER_SENSES = ("vision_config", "audio_config")
# Why neither a chat format nor a layout of the learner fits.
KNOWN_NOT_TO_FIT: Mapping[str, str] = {
    "gpt_oss": "its turns consist of several messages (harmony), and its attention has sinks",
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


def context_of(model_dir: Path) -> int | None:
    """The most tokens that it reads and writes; None where its files do not say."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    given = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return given if isinstance(given, int) and given > 0 else None


def config_problem(config: Mapping[str, object]) -> str | None:
    """Why no job can train a model of this configuration."""
    if not isinstance(config.get("model_type"), str):
        return "its config.json does not say model_type"
    model_type = str(config["model_type"])
    if senses := [name for name in OTHER_SENSES if config.get(name)]:
        return (
            f"{model_type} has parts that see or hear ({', '.join(senses)}); only models of text alone are trained here"
        )
    if model_type in KNOWN_NOT_TO_FIT:
        return f"{model_type} cannot be trained here: {KNOWN_NOT_TO_FIT[model_type]}"
    for name, neutral in HEAD_SETTINGS.items():
        if config.get(name) not in neutral:
            return f"{model_type} sets {name}, which the log-probs do not follow"
    return None


def refusal_of(model_dir: Path, calls: str = "auto") -> str | None:
    """Why no job can train this model, or why nothing here speaks to it; ``calls``: as in the job's ``chat``."""
    problem = problem_of(model_dir)
    if problem is not None:
        return problem
    try:
        return chat_problem(model_dir, calls)
    except (OSError, ValueError) as error:
        return f"{model_dir} cannot be read: {error}"


def chat_problem(model_dir: Path, calls: str) -> str | None:
    """What its chat template writes that no chat format here does. Raises ``ValueError`` for files that are no JSON."""
    template = chat_template_of(model_dir)
    if template is None:
        return None
    if _HARMONY in template:
        return (
            "the model speaks harmony (gpt-oss): a turn of it consists of several messages, which nothing here writes"
        )
    if calls != "auto" or calls_of(template) is not None:
        return None
    known = next((whose for mark, whose in _KNOWN_UNREAD.items() if mark in template), None)
    said = f"writes tool calls as {known} does" if known else "is none whose tool calls are known"
    return (
        f"the model's template {said}, which nothing here reads: set chat.calls to hermes, qwen_xml, glm_xml or "
        "llama_json if it writes them so after all, or to none for environments without tools"
    )


def calls_of(template: str) -> Literal["hermes", "qwen_xml", "glm_xml", "llama_json", "none"] | None:
    """The syntax of calls, by the template's text. A template that never mentions tools writes no calls."""
    if "<tool_call>" in template and "<arg_key>" in template:
        return "glm_xml"
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return "qwen_xml"
    if "<tool_call>" in template and '"arguments"' in template.replace("\\", ""):
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template.replace("\\", ""):
        return "llama_json"
    return None if "tool" in template else "none"


def chat_template_of(model_dir: Path) -> str | None:
    """The text of its chat template. Raises ``ValueError`` for a file that is no JSON."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = model_dir / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    given = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(given, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
        given = named.get("tool_use") or named.get("default")
    return given if isinstance(given, str) else None


_HARMONY = "<|channel|>"
# By a token that stands in the template.
_KNOWN_UNREAD: Mapping[str, str] = {
    "<|tool_call>": "Gemma 4",
    "[TOOL_CALLS]": "Mistral",
    "<｜tool▁calls▁begin｜>": "DeepSeek",
    "<|tool_call_start|>": "LFM2",
    "<|START_ACTION|>": "Command",
    "<|tool_calls_section_begin|>": "Kimi",
}
