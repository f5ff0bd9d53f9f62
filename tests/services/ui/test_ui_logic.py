"""What the viewer makes of answers before anything is drawn: its modules, run by Node without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

MODULES = Path(__file__).parents[3] / "services" / "api" / "ui" / "js"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="Node runs the modules of the viewer and is not here")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules, where Node takes them for what a browser takes them for."""
    place = tmp_path_factory.mktemp("viewer")
    (place / "package.json").write_text('{"type": "module"}')
    shutil.copytree(MODULES, place / "js")
    return place


def answer(modules: Path, script: str, given: object = None) -> Any:
    """What ``script`` returns, as JSON; ``given`` is its only name from outside, and ``load`` imports a module."""
    lines = (
        "const load = (name) => import(`./js/${name}`);",
        f"const given = {json.dumps(given)};",
        f"console.log(JSON.stringify(await (async () => {{ {script} }})()));",
    )
    (modules / "script.js").write_text("\n".join(lines))
    assert NODE is not None
    done = subprocess.run([NODE, "script.js"], cwd=modules, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def health(healthy: bool, environment: str = "calculator", worker: str = "rollout-0") -> dict[str, Any]:
    data = {"worker": worker, "environment": environment, "healthy": healthy, "error": "" if healthy else "gone"}
    return {"type": "env.health", "data": data}


ALARMS = """
    const { toldOf } = await load("pages/job/told.js");
    const told = toldOf();
    given.forEach(told.take);
    return [...told.alarms.values()].map(({ when, text, count }) => [when, text, count]);
"""


def test_an_environment_that_is_well_again_is_no_alarm(modules: Path) -> None:
    assert answer(modules, ALARMS, [health(False), health(True)]) == []


def test_an_environment_that_is_well_says_nothing_of_others(modules: Path) -> None:
    events = [health(False, "search"), health(False), health(False, worker="rollout-1"), health(False), health(True)]
    assert answer(modules, ALARMS, events) == [
        ["rollout-0", "cannot play episodes of search: gone", 1],
        ["rollout-1", "cannot play episodes of calculator: gone", 1],
    ]


def test_an_environment_that_fails_again_is_an_alarm_again(modules: Path) -> None:
    events = [health(False), health(False), health(True), health(False)]
    assert answer(modules, ALARMS, events) == [["rollout-0", "cannot play episodes of calculator: gone", 1]]
