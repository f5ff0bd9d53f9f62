"""Which interpreter an environment runs under, found without running its code."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from gspo_core.env import InvalidEnvironment
from services.hosts.venv import Interpreters, is_installed, requirements_of


def world(directory: Path, *lines: str) -> str:
    path = directory / "world.py"
    path.write_text("\n".join(("raise RuntimeError('imported')", *lines)) + "\n")
    return f"{path}:World"


def block(*dependencies: str) -> tuple[str, ...]:
    return ("# /// script", "# dependencies = [", *(f"#   {one!r}," for one in dependencies), "# ]", "# ///")


def test_an_environment_that_needs_nothing_runs_under_our_interpreter(tmp_path: Path) -> None:
    assert Interpreters(tmp_path).find(world(tmp_path)) == sys.executable
    assert Interpreters(tmp_path).find("environments.calculator:Calculator") == sys.executable
    assert Interpreters(tmp_path).find("no_such_module.at_all:World") == sys.executable


def test_what_is_here_in_the_pinned_version_is_not_installed_again(tmp_path: Path) -> None:
    version = importlib.metadata.version("msgspec")
    assert is_installed(f"msgspec=={version}")
    assert not is_installed("msgspec==0.0.1")
    assert not is_installed("msgspec")
    assert Interpreters(tmp_path).find(world(tmp_path, *block(f"msgspec=={version}"))) == sys.executable


def test_a_module_is_found_without_importing_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    world(package, *block("nothing-like-it==1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements_of("a_package.world:World") == ("nothing-like-it==1",)


def test_a_module_in_folders_without_an_init_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plain_folder" / "inner_folder"
    folder.mkdir(parents=True)
    world(folder, *block("nothing-like-it==1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements_of("plain_folder.inner_folder.world:World") == ("nothing-like-it==1",)


def test_installing_needs_leave_and_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidEnvironment, match="GSPO_ENV_INSTALL=true"):
        Interpreters(tmp_path).find(world(tmp_path, *block("nothing-like-it==1")))


def test_an_installation_that_fails_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    ref = world(tmp_path, *block(str(tmp_path / "absent.whl")))
    for _ in range(2):
        with pytest.raises(InvalidEnvironment, match="installing the requirements failed"):
            Interpreters(tmp_path / "venvs", may_install=True).find(ref)


@pytest.mark.parametrize("line", ["# dependencies = [", "# dependencies = 'x'", "# dependencies = ['-r other.txt']"])
def test_a_block_that_cannot_be_used_says_so(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidEnvironment, match="# /// script"):
        requirements_of(world(tmp_path, "# /// script", line, "# ///"))
