"""Which episodes ``gspo episodes`` lists, and options that would do nothing."""

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


@pytest.mark.parametrize(
    ("which", "more", "told"),
    [
        ("", ("--step", "3"), "is an evaluation"),
        ("/1/0", ("--limit", "5"), "is one episode"),
        ("/1/0", ("--max-reward", "0"), "is one episode"),
    ],
)
def test_what_would_choose_nothing_is_refused(
    folder: Path, which: str, more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["episodes", f"{folder}{which}", *more]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"gspo: {more[0]} chooses among the episodes of a job")
    assert told in said


def test_an_episode_of_a_job_is_not_chosen_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--step", "--limit", "--max-reward"):
        assert main(["episodes", "job_a/17/2", option, "1", "--url", "http://127.0.0.1:9"]) == 1
        assert "job_a/17/2 is one episode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--dry-run", "--watch"), "--watch is for a job, and --dry-run creates none"),
        (("--dry-run", "--key", "k"), "--key is for a job, and --dry-run creates none"),
        (("--json",), "--json prints all of the answer of --dry-run"),
    ],
)
def test_a_submission_is_refused_with_what_it_would_not_do(
    more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "job.yaml", *more]) == 1
    assert told in capsys.readouterr().err
