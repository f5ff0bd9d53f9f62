"""What can be told of a model directory without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_core.model_files import problem_of

SOUND = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def write_files(directory: Path, config: object = SOUND, *, without: str = "") -> Path:
    files = {"config.json": json.dumps(config), "tokenizer.json": "{}", "model.safetensors": ""}
    for name, text in files.items():
        if name != without:
            (directory / name).write_text(text)
    return directory


def test_a_sound_directory_has_no_problem(tmp_path: Path) -> None:
    assert problem_of(write_files(tmp_path)) is None
    assert problem_of(write_files(tmp_path, SOUND | {"logit_scale": 1, "vision_config": None})) is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ([], "holds no object"),
        ({}, "does not say model_type"),
        (SOUND | {"final_logit_softcapping": 30.0}, "qwen3 sets final_logit_softcapping"),
        ({"model_type": "gemma3", "vision_config": {"depth": 2}}, "gemma3 has parts that see or hear (vision_config)"),
        ({"model_type": "qwen2_5_omni", "audio_config": {"n": 1}}, "only models of text alone are trained here"),
        ({"model_type": "gpt_oss"}, "gpt_oss cannot be trained here: its turns consist of several messages (harmony)"),
    ],
)
def test_a_configuration_that_cannot_be_trained_is_named(tmp_path: Path, config: Any, problem: str) -> None:
    assert problem in (problem_of(write_files(tmp_path, config)) or "")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    found = problem_of(write_files(tmp_path, without=name)) or ""
    assert f"holds no {name.replace('model', '*')}" in found


def test_what_is_no_directory_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "nope") == f"there is no directory {tmp_path}/nope"
    write_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in (problem_of(tmp_path) or "")
