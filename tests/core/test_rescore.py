"""Another reward over recorded episodes: the old one gives what was recorded, and a bug in one is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_core.cli import main
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.rescoring import RecordedEpisode, RewardFailed, rescore
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, SIZE, MadePast, make_past, spec_of

NUM_STEPS = 84


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    model = write_model(tmp_path_factory.mktemp("model"))
    spec = spec_of(model, steps=NUM_STEPS, checkpoint_every=1000)
    return make_past(tmp_path_factory.mktemp("jobs") / "job_a", spec, steps=NUM_STEPS, trains=False)


def planted(episode: RecordedEpisode) -> float:
    """The bug: a right answer counts only where the form is good."""
    return episode.reward_parts["exact"] * (episode.reward_parts["form"] > 0.5) + episode.reward_parts["form"]


def test_the_old_reward_gives_every_recorded_reward_exactly(past: MadePast) -> None:
    rows = list(rescore(Past(past.folder), lambda episode: episode.reward, range(1, NUM_STEPS + 1)))
    assert len(rows) == NUM_STEPS * GROUPS * SIZE > 1000
    assert all(row.new == row.old and row.new_advantage == row.old_advantage for row in rows)
    by_parts = rescore(Past(past.folder), lambda episode: episode.reward_parts, range(1, NUM_STEPS + 1))
    assert all(row.new == row.old for row in by_parts)


def test_a_planted_bug_is_found_with_the_advantages_that_flip(past: MadePast) -> None:
    rows = list(rescore(Past(past.folder), planted, [3, 4]))
    wrong = [row for row in rows if row.new != row.old]
    assert wrong
    assert all(row.new == pytest.approx(row.old - 1) for row in wrong)
    flipped = [row for row in rows if row.flips]
    assert flipped
    assert all(row.old_advantage * row.new_advantage < 0 for row in flipped)


def test_a_function_is_given_what_was_said(past: MadePast) -> None:
    seen: list[RecordedEpisode] = []

    def look(episode: RecordedEpisode) -> float:
        seen.append(episode)
        return 0.0

    list(rescore(Past(past.folder), look, [2], decode=lambda ids: " ".join(map(str, ids))))
    assert len(seen) == GROUPS * SIZE
    assert all(len(one.said) == 2 and one.said[0] in one.text for one in seen)
    assert [" ".join(map(str, ids)) for ids in seen[0].said_ids] == list(seen[0].said)


def test_what_is_no_reward_is_refused_with_the_episode(past: MadePast) -> None:
    with pytest.raises(RewardFailed, match=r"job_a/3/0: ZeroDivisionError"):
        list(rescore(Past(past.folder), lambda episode: 1 / 0, [2]))
    with pytest.raises(RewardFailed, match=r"job_a/3/0 is nan"):
        list(rescore(Past(past.folder), lambda episode: float("nan"), [2]))
    with pytest.raises(NotKept):
        list(rescore(Past(past.folder), lambda episode: 0.0, [99_999]))


def test_the_command_sums_up(past: MadePast, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(episode):\n    return {'exact': episode.reward_parts['exact']}\n")
    arguments = ["rescore", str(past.folder), "--reward", f"{file}:score", "--first", "3", "--last", "4"]
    assert main(arguments) == 0
    assert f"{2 * GROUPS * SIZE} episodes with a reward; {2 * GROUPS * SIZE} get another" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["other_reward"] for row in rows} <= {0.0, 1.0}
    assert main([*arguments[:3], f"{file}:none"]) == 1
    assert main([*arguments[:3], "none"]) == 1
    assert "write FILE.py:NAME" in capsys.readouterr().err
    assert main([*arguments[:3], f"{tmp_path}/none.py:score"]) == 1
    assert f"there is no file {tmp_path}/none.py" in capsys.readouterr().err


def test_a_reward_of_a_file_has_its_neighbours_and_its_mistakes_are_told(
    past: MadePast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_the_reward.py").write_text("WORTH = 1.0\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom beside_the_reward import WORTH\n"
        "@dataclass\nclass Judge:\n    worth: float\n\n"
        "def score(episode):\n    return Judge(WORTH).worth\n"
    )
    arguments = ["rescore", str(past.folder), "--first", "3", "--last", "3", "--reward"]
    assert main([*arguments, f"{file}:score"]) == 0
    for text, told in (
        ("1 / 0", "ZeroDivisionError"),
        ("def score(", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
    ):
        broken = tmp_path / "broken.py"
        broken.write_text(f"{text}\n")
        capsys.readouterr()
        assert main([*arguments, f"{broken}:score"]) == 1
        assert told in capsys.readouterr().err


def test_where_the_rewards_go_is_looked_at_before_an_episode_is_judged(
    past: MadePast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, reward = tmp_path / "rewards.json", tmp_path / "mine.py"
    target.write_text("{}")
    reward.write_text("def score(episode):\n    raise AssertionError('it was asked')\n")
    assert main(["rescore", str(past.folder), "--reward", f"{reward}:score", "--to", str(target)]) == 1
    assert "rewards.json is there already" in capsys.readouterr().err
    assert target.read_text() == "{}"
