from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gspo_core import __version__

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)], cwd=ROOT, check=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"gspo_core"}
    assert "gspo_core/py.typed" in names


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
    assert "make up" in done.stderr


def test_the_manifests_of_the_cluster_name_the_images_of_this_version() -> None:
    tags = [
        tag
        for path in (ROOT / "k8s").rglob("kustomization.yaml")
        for tag in re.findall(r"name: gspo-[a-z]+,.*newTag: ([^}]+)}", path.read_text())
    ]
    assert len(tags) >= 5
    assert set(tags) == {__version__}


def test_every_dependency_is_pinned() -> None:
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    names = {one.split(">")[0].split("[")[0].strip().lower().replace("_", "-") for one in wanted}
    assert names - pins == set()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_imports_follow_the_plan() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_a_grab_bag() -> None:
    bad = {"utils.py", "util.py", "common.py", "misc.py", "helpers.py", "base.py"}
    found = [
        path
        for folder in ("gspo_core", "services", "environments", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(found) > 20
    assert [path for path in found if path.name in bad] == []
