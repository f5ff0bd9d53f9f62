"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

from gspo_core.env import load_environment
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split
from tests.repo.pages import ROOT, block


async def test_the_environment_of_the_readme_can_be_played(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(block("README.md", "class Counter").text)
    assert len((tmp_path / "counter.py").read_text().splitlines()) <= 20
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


def test_the_output_of_the_demo_is_that_of_the_demo() -> None:
    """Whatever its numbers: each line of README.md begins as one that the demo prints."""
    printed = "".join(path.read_text() for path in (ROOT / "examples" / "demo").glob("*.py"))
    lines = block("README.md", "held-out success ").text.splitlines()
    labels = [line.split("   ")[0] for line in lines if not line.startswith(" ")]
    assert len(labels) >= 4
    assert [label for label in labels if not re.search(rf'"(\\n)?{label} ', printed)] == []


def test_the_job_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(block("README.md", "ref: counter.py").text)
    assert load_job_spec(tmp_path / "job.yaml").rollout.max_staleness == 4
