from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gspo_core import __version__
from release import images
from release.build import build, digests

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheels")
    build(target)
    return target


@pytest.fixture(scope="module")
def wheel(wheels: Path) -> Path:
    return wheels / f"gspo-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def service_wheel(wheels: Path) -> Path:
    return wheels / f"gspo_service-{__version__}-py3-none-any.whl"


def test_a_wheel_takes_one_name_of_site_packages(wheel: Path, service_wheel: Path) -> None:
    for path, name in ((wheel, "gspo_core"), (service_wheel, "gspo_service")):
        top = {entry.split("/")[0] for entry in zipfile.ZipFile(path).namelist()}
        assert {entry for entry in top if not entry.endswith(".dist-info")} == {name}


def test_the_wheels_hold_every_file_of_their_packages(wheel: Path, service_wheel: Path) -> None:
    names = [set(zipfile.ZipFile(path).namelist()) for path in (wheel, service_wheel)]
    assert tracked("gspo_core", "environments") == {
        name.removeprefix("gspo_core/tree/") for name in names[0] if ".dist-info/" not in name
    }
    assert tracked("gspo_core", "environments", "services", "examples") == {
        name.removeprefix("gspo_service/tree/") for name in names[1] if name.startswith("gspo_service/tree/")
    }


def tracked(*folders: str) -> set[str]:
    """What git knows or would know."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_same_commit_gives_the_same_bytes(wheels: Path, tmp_path: Path) -> None:
    build(tmp_path)
    assert digests(tmp_path) == digests(wheels)


def in_site(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as it is where wheels were unpacked into `folder`."""
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from gspo_core.cli import main\n"
        "import gspo_core; assert gspo_core.__file__.startswith(sys.path[0]) or sys.path[0].endswith('tree')\n"
        "status = main(sys.argv[1:])\n"
        "found = sys.modules.get('services'); print('services:', found and found.__file__)\n"
        "sys.exit(status)\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", program, str(folder), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_finds_the_service_in_its_tree(wheel: Path, service_wheel: Path, tmp_path: Path) -> None:
    for path in (wheel, service_wheel):
        zipfile.ZipFile(path).extractall(tmp_path)
    done = in_site(tmp_path, "doctor", "--url", "http://127.0.0.1:9")
    assert f"services: {tmp_path / 'gspo_service' / 'tree' / 'services' / '__init__.py'}" in done.stdout, done.stderr
    assert "✓ services" in done.stdout


def test_what_is_launched_elsewhere_runs_from_the_wheels_too(wheel: Path, service_wheel: Path, tmp_path: Path) -> None:
    for path in (wheel, service_wheel):
        zipfile.ZipFile(path).extractall(tmp_path)
    done = in_site(tmp_path, "launch", "slurm", "--data-dir", "data", "--model", "m")
    assert f"cd {tmp_path / 'gspo_service' / 'tree'}\n" in done.stdout, done.stderr


def test_the_library_alone_has_the_adapters(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = in_site(tmp_path, "env", "validate", "environments.calculator:Calculator", "--json")
    assert json.loads(done.stdout[: done.stdout.rindex("}") + 1])["ok"], done.stdout + done.stderr


def test_wheels_of_two_versions_are_refused(wheel: Path, service_wheel: Path, tmp_path: Path) -> None:
    for path in (wheel, service_wheel):
        zipfile.ZipFile(path).extractall(tmp_path)
    (tmp_path / "gspo_service" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    done = in_site(tmp_path, "doctor")
    assert done.returncode == 1
    assert f"gspo {__version__} and gspo-service 0.0.1 are installed" in done.stderr


def test_the_light_half_runs_from_the_wheel_without_the_heavy_packages(wheel: Path, tmp_path: Path) -> None:
    """None in sys.modules makes an import of that name fail, as if it were not installed."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    heavy = [
        "torch",
        "transformers",
        "redis",
        "fastapi",
        "uvicorn",
        "structlog",
        "services",
        "environments",
        "examples",
    ]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy!r}))\n"
        "import gspo_core, gspo_core.types, gspo_core.spec, gspo_core.spec_file, gspo_core.env, gspo_core.chat\n"
        "import gspo_core.codec, gspo_core.assemble, gspo_core.advantage, gspo_core.staleness, gspo_core.client\n"
        "from gspo_core.cli import main\n"
        "assert gspo_core.__file__.startswith(sys.argv[1]), gspo_core.__file__\n"
        "sys.exit(main(['up']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Install gspo-service of the same version" in done.stderr


def test_every_dependency_is_pinned() -> None:
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    names = {one.split(">")[0].split("[")[0].strip().lower().replace("_", "-") for one in wanted} - {"gspo"}
    assert names - pins == set()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def docker(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """A program of that name, alone on PATH, and what it was asked."""
    asked = folder / "asked"
    (folder / "docker").write_text("\n".join(["#!/bin/sh", f'echo "$@" >> {asked}', *lines]))
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return asked


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((), "no docker"),
        (('test "$1" != info',), "no Docker daemon answers"),
        (('test "$1 $2" != "compose version"',), "no compose"),
    ],
)
def test_a_release_says_why_it_has_no_images(
    lines: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = docker(tmp_path, monkeypatch, *lines)
    if not lines:
        (tmp_path / "docker").unlink()
    said = images.build(ROOT)
    assert problem in said
    assert "make images" in said
    assert "build" not in (asked.read_text() if asked.exists() else "")


def test_a_release_builds_every_image_where_docker_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones compose then builds is test_compose_config's."""
    asked = docker(tmp_path, monkeypatch)
    assert "built" in images.build(ROOT)
    assert asked.read_text().splitlines()[-1] == "compose --profile * build"
    docker(tmp_path, monkeypatch, 'test "$4" != build')
    with pytest.raises(images.NotBuilt, match="ended with code 1"):
        images.build(ROOT)
    assert "release.build --images" in (ROOT / "Makefile").read_text()


def test_no_module_is_a_grab_bag() -> None:
    bad = {"utils.py", "util.py", "common.py", "misc.py", "helpers.py", "base.py"}
    found = [
        path
        for folder in ("gspo_core", "services", "environments", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(found) > 20
    assert [path for path in found if path.name in bad] == []
