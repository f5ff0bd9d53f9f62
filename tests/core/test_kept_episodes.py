"""The episodes of an evaluation that was kept, as ``gspo episodes DIR`` lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.cli import main
from gspo_core.evaluation.played import SETTING_FILE, EpisodePlace, Played, PlayedFile

REWARDS = (0.0, None, 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / SETTING_FILE).write_text("{}")
    file = PlayedFile(tmp_path)
    for task, reward in enumerate(REWARDS):
        failure = "no answer" if reward is None else None
        file.add(Played(EpisodePlace(task, 0), 1, "completed", reward, failure))
    file.close()
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> list[str]:
    assert main(["episodes", str(folder), *more]) == 0
    return [line.split()[0].removeprefix(f"{folder}/") for line in capsys.readouterr().out.splitlines()]


def test_what_failed_has_no_reward_and_so_none_of_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, folder) == ["0/0", "1/0", "2/0"]
    assert listed(capsys, folder, "--max-reward", "0") == ["0/0"]
    assert listed(capsys, folder, "--max-reward", "1", "--limit", "1") == ["0/0"]


@pytest.mark.parametrize("limit", ["-1", "0", "many"])
def test_a_list_has_at_least_one_line(folder: Path, limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A number below 0 dropped the last ones in silence, and was a traceback of a job's list."""
    with pytest.raises(SystemExit):
        main(["episodes", str(folder), "--limit", limit])
    assert f"'{limit}' is not a number of at least 1" in capsys.readouterr().err
