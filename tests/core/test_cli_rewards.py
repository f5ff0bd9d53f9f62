"""Files of rewards that commands are given: what is in them, and what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.cli.command import CommandError
from gspo_core.cli.jobs import read_rewards, retrain


@pytest.mark.parametrize(
    "text", ['{"1": 1}', "[]", "[{}]", "[1]", '[{"1": "x"}]', '[{"1": null}, {"2": 1}]', '[{"1": NaN}]']
)
def test_groups_of_traces_are_rewards_by_trace(tmp_path: Path, text: str) -> None:
    """Without any the steps of the job would be taken."""
    file = tmp_path / "groups.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"groups\.json: write a list of groups"):
        retrain(
            "http://127.0.0.1:1",
            "job_a",
            [],
            first=None,
            last=None,
            rewards=None,
            traces=str(file),
            name=None,
            dry_run=True,
        )


@pytest.mark.parametrize("text", ["[]", '{"1/0": "x"}', '{"1/0": Infinity}', '{"1/0": [1]}'])
def test_rewards_are_numbers_by_episode(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rewards.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"rewards\.json: write"):
        read_rewards(str(file))
    file.write_text('{"1/0": 1, "1/1": 0.5}')
    assert read_rewards(str(file)) == {"1/0": 1.0, "1/1": 0.5}
    assert read_rewards(None) == {}
