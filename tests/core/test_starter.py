"""A starting model: what it is taught fits its world, and a folder is whole or not there."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_core.cli import main
from gspo_core.env import PlainEnvironment, Timeouts
from gspo_core.spec_file import load_job_spec
from gspo_core.starter import making
from gspo_core.starter.playing import ENDING, PlayedEpisode, chosen, play
from tests.core.test_env_validate import Counter, oracle_of_counter

WORLD = """
class Counter:
    \"\"\"Raise the counter to the target, then say done.\"\"\"

    tasks = [{"target": n} for n in range(3, 12)]

    def reset(self, target: int):
        self.value, self.target = 0, target
        return f"Reach exactly {target}."

    def add(self, amount: int) -> str:
        \"\"\"Add to the counter.

        Args:
            amount: how much (1..5)
        \"\"\"
        self.value += amount
        return str(self.value)

    def get_reward(self):
        return float(self.value == self.target)
"""
TIMEOUTS = Timeouts(5.0, 5.0, 5.0, 5.0)


class WithOracle(Counter):
    @staticmethod
    def oracle(target: int) -> list[Any]:
        return oracle_of_counter(target)


def played(cls: type, **bounds: Any) -> list[PlayedEpisode]:
    given = {"number": 60, "max_turns": 6, "seconds": 60.0} | bounds
    return asyncio.run(play(PlainEnvironment(cls, {}, name="c"), TIMEOUTS, seed=3, **given))


def test_what_is_played_is_as_a_policy_would_have_said_it() -> None:
    for one in played(Counter):
        assert [message["role"] for message in one.said[::2]] == ["assistant"] * len(one.said[::2])
        assert {message["role"] for message in one.said[1::2]} <= {"tool"}
        assert one.said[-1] == {"role": "assistant", "content": ENDING}
    first, second = played(Counter), played(Counter)
    assert [one.said for one in first] == [one.said for one in second]


def test_an_oracle_makes_better_episodes() -> None:
    plain, helped = (sum(one.reward for one in played(cls)) for cls in (Counter, WithOracle))
    assert helped > plain + 5


def test_slow_tools_bound_what_is_played() -> None:
    assert len(played(Counter, seconds=0.0)) == 1


def test_better_episodes_are_seen_more_often() -> None:
    episodes = [PlayedEpisode([], [], [], float(number)) for number in range(100)]
    seen = [one.reward for one in chosen(episodes, 400, random.Random(0))]
    assert sum(reward >= 75 for reward in seen) > 200


def test_a_folder_has_a_model_and_a_job_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "NUM_EPISODES", 40)
    monkeypatch.setattr(making, "NUM_STEPS", 3)
    monkeypatch.setattr(making, "WARMUP_STEPS", 1)
    monkeypatch.setattr(making, "TOLD_EVERY", 1)
    (tmp_path / "counter.py").write_text(WORLD)
    asked = ["starter", f"{tmp_path / 'counter.py'}:Counter", "--to", str(tmp_path / "made")]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "step 3 of 3, loss" in said
    assert f"gspo up --model {tmp_path / 'made'}" in said
    spec = load_job_spec(tmp_path / "made" / "job.yaml")
    assert (spec.model, spec.environments[0].ref) == (str(tmp_path / "made"), asked[1])
    assert yaml.safe_load((tmp_path / "made" / "job.yaml").read_text())["name"] == "Counter"
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {
        path.name for path in (tmp_path / "made").iterdir()
    }
    assert main(asked) == 1
    assert "is there already" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"counter.py", "made"}


def test_a_world_that_says_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "NUM_EPISODES", 20)
    monkeypatch.setattr(making, "CONTEXT_TOKENS", 64)
    with pytest.raises(making.CannotStart, match="a model of this size reads 64"):
        making.make_starter(PlainEnvironment(Counter, {}, name="c"), "c", {}, tmp_path / "made", seed=0, say=str)
    assert list(tmp_path.iterdir()) == []
