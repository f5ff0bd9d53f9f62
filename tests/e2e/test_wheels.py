"""As a new user without a checkout: the two wheels in a virtual environment of their own, an empty folder, a job; and
the library alone, with the adapters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.build import ROOT, build, version

pytestmark = pytest.mark.third_party

JOB = """
name: calculator
model: {model}
environments: [{{ref: "environments.calculator:Calculator"}}]
rollout: {{group_size: 8, max_staleness: 2}}
sampling: {{max_new_tokens: 64}}
limits: {{max_turns: 4, max_context_tokens: 512}}
objective: {{name: gspo, clip: [5.0e-2, 8.0e-2]}}
optimizer: {{lr: 1.0e-4}}
steps: 12
groups_per_step: 8
evaluation: {{tasks: 200, every: 12}}
"""
HELD_OUT = re.compile(r"held-out reward ([0-9.]+) .* after step (\d+)")
READY_S, LEARNED_S = 1200, 1200
LISTED = """
import importlib, importlib.util, json, pkgutil
from gspo_core.cli.trees import search_trees

search_trees()
import environments.adapters as adapters

names = [one.name for one in pkgutil.iter_modules(adapters.__path__)]
files = [importlib.import_module(f"environments.adapters.{name}").__file__ for name in names]
packages = ["gymnasium", "mcp", "pyarrow", "reasoning_gym", "websockets", "torch", "gspo_service"]
print(json.dumps([names, files, [name for name in packages if importlib.util.find_spec(name)]]))
"""
WORLDS = {
    "gym:gym": {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "replayable": True},
    "reasoning_gym:ReasoningGym": {"name": "leg_counting", "num_tasks": 20},
}


def installed(folder: Path, what: str) -> Path:
    """The command, in a virtual environment that has ``what`` of the wheels of this tree."""
    build(folder)
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    found = ["--find-links", str(folder), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *found, f"{what}=={version()}"], check=True)
    return folder / "venv" / "bin" / "gspo"


@pytest.fixture(scope="module")
def gspo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed"), "gspo-service")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("adapters"), "gspo[adapters]")


@pytest.fixture
def clean() -> dict[str, str]:
    """Nothing of ours in the environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("GSPO_", "PYTHON"))}


@pytest.fixture
def api(gspo: Path, clean: dict[str, str], tmp_path: Path) -> Iterator[str]:
    log = tmp_path / "up.log"
    with log.open("w") as output:
        stack = subprocess.Popen([gspo, "up", "--port", "0"], cwd=tmp_path, env=clean, stdout=output, stderr=output)
    try:
        yield address(stack, log)
    finally:
        stack.send_signal(signal.SIGTERM)
        assert stack.wait(60) == 0, log.read_text()


def address(stack: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and stack.poll() is None:
        text = log.read_text()
        listening = re.search(r"\bapi +listening +url=(\S+)", text)
        if listening and "serving" in text:
            return listening[1]
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def test_a_job_learns_where_only_the_wheels_are(gspo: Path, clean: dict[str, str], api: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(model=tmp_path / ".gspo" / "models" / "calculator-tiny"))
    submit = [gspo, "submit", "--watch", "--url", api, "job.yaml"]
    done = subprocess.run(
        submit, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=LEARNED_S, check=False
    )
    print(done.stdout, file=sys.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    reward = {int(step): float(value) for value, step in HELD_OUT.findall(done.stdout)}
    assert reward[12] > reward[0] + 0.3


def test_the_library_alone_lists_its_adapters_and_what_the_extra_brings(
    library: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    command = [library.with_name("python"), "-P", "-c", LISTED]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, files, packages = json.loads(done.stdout)
    assert set(names) == {path.stem for path in (ROOT / "environments" / "adapters").glob("[!_]*.py")}
    assert [file for file in files if not file.startswith(str(library.parents[1]))] == []
    assert packages == ["gymnasium", "mcp", "pyarrow", "reasoning_gym", "websockets"]


@pytest.mark.parametrize("world", WORLDS)
def test_an_adapter_of_the_library_alone_plays(
    world: str, library: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    words = ["env", "validate", f"environments.adapters.{world}", "--config", json.dumps(WORLDS[world]), "--json"]
    done = subprocess.run([library, *words], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


def test_the_doctor_says_that_the_service_is_there(gspo: Path, clean: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([gspo, "doctor"], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert "✓ services" in done.stdout
    assert "✓ training" in done.stdout
    site = gspo.parent.parent / "lib"
    assert not [
        path for name in ("services", "environments", "examples") for path in site.glob(f"*/site-packages/{name}")
    ]
