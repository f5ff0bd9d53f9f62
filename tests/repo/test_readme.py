"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

from gspo_core.env import load_environment
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split

ROOT = Path(__file__).parents[2]


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [one for one in blocks if containing in one]
    return str(found)


async def test_the_environment_of_the_readme_can_be_played(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(block("python", "class Counter"))
    environment = load_environment(f"{tmp_path}/counter.py:Counter", {})
    assert environment.num_tasks(Split.TRAIN) == 9
    session = environment.session()
    start = await session.start({"target": 3}, 0)
    assert start.messages[-1]["content"] == "Reach exactly 3."
    for amount, shown in ((2, "2"), (1, "3")):
        call = ToolCall("add", {"amount": amount}, CallStatus.OK, "", 0, 1)
        observation = await session.act(ParsedTurn("", (call,), True))
        assert observation.messages[-1]["content"] == shown
    reward, _ = await session.score()
    await session.close()
    assert reward == 1.0


def test_the_job_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(block("yaml", "counter.py:Counter"))
    assert load_job_spec(tmp_path / "job.yaml").rollout.max_staleness == 4
