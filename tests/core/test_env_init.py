"""``gspo env init``: what it makes is sound and passes its own tests at once."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gspo_core.cli import main
from gspo_core.spec_file import load_job_spec
from gspo_core.testing import scripted_llm

GSPO = ("-c", "import sys; from gspo_core.cli import main; sys.exit(main())")
FILES = ["README.md", "job.yaml", "number_hunt.py", "test_number_hunt.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "number-hunt"


@pytest.mark.parametrize("options", [[], ["--agent"]], ids=["environment", "agent"])
def test_a_new_project_is_sound_and_passes_its_tests(folder: Path, options: list[str]) -> None:
    assert main(["env", "init", "number-hunt", *options]) == 0
    assert sorted(one.name for one in folder.iterdir()) == FILES
    (entry,) = load_job_spec(folder / "job.yaml").environments
    assert (entry.agent is not None) == bool(options)
    validated = run(folder, *GSPO, "env", "validate", entry.ref)
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert "!" not in validated.stdout  # no warnings either
    for command in commands(folder / "README.md"):
        assert entry.ref in command or not command.startswith("gspo env"), command
    # Its tests are plain functions, so that they need no settings of pytest's.
    tested = run(folder, "-W", "error", "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout


def test_episodes_of_a_new_agent_share_a_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["env", "init", "number-hunt", "--agent"]) == 0
    agent = runpy.run_path(str(folder / "number_hunt.py"))
    monkeypatch.delattr(httpx, "Client")
    monkeypatch.delattr(httpx, "AsyncClient")
    for _ in range(2):
        with scripted_llm("5") as llm:
            assert agent["run"]({"number": 4}, llm) == {"right": 1.0}
    agent["client"].close()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def commands(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith(("gspo ", "pytest"))]


@pytest.mark.parametrize("name", ["Shop", "1shop", "my shop", "../shop", "class", "json", "pydantic", "sh\u00f6p", ""])
def test_names_that_cannot_be_modules_are_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "init", name]) == 1
    assert "name" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_nothing_that_is_there_is_overwritten(folder: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    if there == "folder":
        folder.mkdir()
    elif there == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to("nowhere")
    assert main(["env", "init", "number-hunt"]) == 1
    assert "is there already; nothing was written" in capsys.readouterr().err
    assert [one.name for one in folder.parent.iterdir()] == ["number-hunt"]
    assert there != "folder" or list(folder.iterdir()) == []


def test_it_goes_where_it_is_told(folder: Path) -> None:
    assert main(["env", "init", "number_hunt", "--folder", "deep/down"]) == 0
    assert sorted(one.name for one in Path("deep/down").iterdir()) == FILES
