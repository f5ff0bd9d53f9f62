"""The command lines of engines that are not ours."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from services.launch import engine_command
from services.launch.engine_command import EngineCommand

ROOT = Path(__file__).parents[3]
VALUES = {"model": "MODEL", "host": "127.0.0.1", "port": "30000", "gpus": "2"}
# What a machine without a network, or a fork of tokenizers, needs beside what the engine itself does.
OWN = {"HF_HUB_OFFLINE", "DO_NOT_TRACK", "TOKENIZERS_PARALLELISM"}


@pytest.mark.parametrize("module", ["sglang.launch_server", "vllm.entrypoints.openai.api_server"])
def test_the_command_of_the_page_is_that_of_gspo_up(module: str) -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    (block,) = (one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if module in one)
    words = shlex.split(block.replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    if is_vllm := module.startswith("vllm"):
        ours = engine_command.vllm((), python="PYTHON", on_gpu=True)
    else:
        ours = engine_command.sglang((), python="PYTHON", on_gpu=True, has_keys=False)
    expected = {name: value for name, value in ours.environment.items() if name not in OWN}
    if is_vllm:
        variables["PYTHONPATH"] = str(ROOT / variables["PYTHONPATH"])
    assert variables == expected
    place = words[words.index("PYTHON") :]
    assert place == ours.filled(VALUES)[: len(place)]
    assert ours.filled(VALUES)[len(place) :] == ["--tensor-parallel-size" if is_vllm else "--tp", "2"]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_what_is_given_comes_last_and_wins(name: str) -> None:
    further = ("--dtype", "bfloat16")
    if name == "vllm":
        command = engine_command.vllm(further, python="p", on_gpu=False)
    else:
        command = engine_command.sglang(further, python="p", on_gpu=False, has_keys=False)
    assert command.words[-2:] == further


def test_an_address_begins_with_the_kind_that_is_not_the_default() -> None:
    assert engine_command.vllm((), python="p", on_gpu=False).scheme == "vllm+http"
    assert EngineCommand(("p",)).scheme == "http"


def test_the_folder_inside_vllm_holds_nothing_that_it_would_import_by_mistake() -> None:
    """It is put on the path of a foreign interpreter: any other name there would hide one of its own."""
    folder = Path(engine_command.VLLM_ENVIRONMENT["PYTHONPATH"])
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"__init__.py", "gspo_vllm.py"}


def test_a_named_python_is_taken_and_one_that_is_not_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert engine_command.find_vllm() is None
    assert engine_command.find_vllm("/nowhere/python") is None
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy("/bin/true", python)
    assert engine_command.find_vllm() == str(python)
    assert engine_command.find_vllm("/bin/true") == "/bin/true"
