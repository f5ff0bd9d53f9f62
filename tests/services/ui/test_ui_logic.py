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


PAGES = """
    const asked = [];
    const event = (_, at) => ({ id: `${at + 1}`, type: "evaluation", data: { step: at } });
    const events = Array.from({ length: given }, event);
    globalThis.fetch = async (path) => {
      const query = new URL(path, "http://service").searchParams;
      const [after, limit] = [Number(query.get("after") ?? 0), Number(query.get("limit"))];
      const data = events.slice(after, after + limit);
      asked.push(limit);
      const page = { data, has_more: after + limit < events.length, last_id: data.at(-1)?.id ?? null };
      return { ok: true, json: async () => page };
    };
    const { readTold } = await load("pages/job/told.js");
    const told = await readTold("job", null);
    return { newest: told.at(-1)?.data.step ?? null, count: told.length, asked };
"""


def test_the_newest_events_are_read_however_many_came_before(modules: Path) -> None:
    assert answer(modules, PAGES, 2500) == {"newest": 2499, "count": 2500, "asked": [1000] * 3}
    assert answer(modules, PAGES, 10_000)["newest"] == 9999


def test_a_job_that_told_nothing_is_asked_once(modules: Path) -> None:
    assert answer(modules, PAGES, 0) == {"newest": None, "count": 0, "asked": [1000]}


NUMBERS = """
    const { fixed, number } = await load("format.js");
    return given.map((value) => [number(value), fixed(value)]);
"""


def test_a_small_number_is_not_shown_as_zero(modules: Path) -> None:
    shown = {
        1e-6: ["1e-6", "1e-6"],
        -2.5e-7: ["-2.5e-7", "-2.5e-7"],
        0.00025: ["0.00025", "0.00025"],
        0.0015: ["0.0015", "0.0015"],
        0.004: ["0.004", "0.004"],
    }
    assert answer(modules, NUMBERS, list(shown)) == list(shown.values())


def test_other_numbers_are_shown_as_before(modules: Path) -> None:
    shown = {
        0.0: ["0", "0.00"],
        0.05: ["0.05", "0.05"],
        0.1234: ["0.123", "0.12"],
        -1.5: ["-1.5", "-1.50"],
        12345.6: ["12,346", "12345.60"],
        5e-17: ["0", "0.00"],  # what is left of 0.1 + 0.2 - 0.3
    }
    assert answer(modules, NUMBERS, list(shown)) == list(shown.values())


def test_counts_and_what_is_missing_are_shown_as_before(modules: Path) -> None:
    script = """
        const { fixed, number } = await load("format.js");
        return [number(0.3, 0), number(7, 0), number(0.04, 1), number(null), fixed(undefined)];
    """
    assert answer(modules, script) == ["0", "7", "0", "–", "–"]


DETAILS = """
    const asked = [];
    globalThis.fetch = async (path) => (asked.push(path), { ok: true, json: async () => ({ turns: ["said"] }) });
    const { detail } = await load("pages/group.js");
    return [await Promise.all(given.map((one) => detail(one))), asked];
"""


def test_a_group_is_shown_though_an_episode_of_it_was_erased(modules: Path) -> None:
    """Which is answered with 404, and one that is refused would take the page with it."""
    members = [{"id": f"job/4/{number}", "reward": 1.0, "is_erased": number == 1} for number in range(3)]
    shown, asked = answer(modules, DETAILS, members)
    assert asked == ["/v1/episodes/job/4/0", "/v1/episodes/job/4/2"]
    assert shown[1] == members[1] | {"turns": []}
    assert [one["turns"] for one in shown] == [["said"], [], ["said"]]
