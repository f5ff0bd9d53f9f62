"""Tables of a job's past hold what the log holds, and are read by everything that reads Parquet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_core.cli import main
from gspo_core.log import layout
from gspo_core.log.batches import encode_batch
from gspo_core.log.sequences import train_batch
from gspo_core.log.steps import logged_sequences
from gspo_core.log.trained import encode_trained
from gspo_core.replay.past import Past
from gspo_core.replay.tables import episode_rows, metric_rows, step_row, token_columns
from gspo_core.types import Outcome, StopReason, Trajectory
from tests.core.learner_support import write_model
from tests.core.past_kit import GROUPS, SIZE, make_past, spec_of

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("past")
    made = make_past(root / "job_a", spec_of(write_model(root / "model")), steps=STEPS, trains=False)
    lines = [{"step": 1, "epoch": 1, "gspo/loss": 0.5}, {"step": 2, "epoch": 1, "gspo/loss": -0.25, "reward/mean": 1}]
    (made.folder / layout.METRICS).write_text("".join(f"{json.dumps(one)}\n" for one in lines) + '{"step": 3, "gs')
    past = Past(made.folder)
    batch = past.batch(2)
    train = logged_sequences(batch, past.spec.objective.advantage)
    told = train.by_episode([np.arange(one.num_actions, dtype=np.float32) for one in train.sequences])
    place = made.folder / layout.TRAINED / layout.step_name(batch.position)
    place.parent.mkdir()
    place.write_bytes(encode_trained(told))
    return made.folder


def test_rows_say_what_the_log_says(folder: Path) -> None:
    past = Past(folder)
    batch = past.batch(2)
    row = step_row(batch)
    assert (row.step, row.groups, row.episodes) == (2, GROUPS, GROUPS * SIZE)
    assert (row.version, row.max_staleness, row.dropped_groups) == (1, 1, 0)
    episodes = list(episode_rows(past, batch))
    assert sum(one.sampled_tokens for one in episodes) == row.sampled_tokens
    for logged, one in zip(batch.trajectories, episodes, strict=True):
        assert (one.group, one.member, one.reward) == (logged.key.group, logged.key.member, logged.reward)
        assert one.reward == pytest.approx(sum(one.reward_parts.values()))
        assert {one.first_version, one.last_version} == set(logged.versions)
    train = train_batch(batch.groups, np.zeros_like, past.spec.objective.advantage)
    assert [one.advantages for one in train.sequences] == [one.advantage for one in episodes]


def test_tokens_are_those_that_were_trained(folder: Path) -> None:
    past = Past(folder)
    for step in (1, 2):
        batch = past.batch(step)
        for episode, one in zip(batch.trajectories, token_columns(past, batch), strict=True):
            [branch] = episode.branches
            assert one.token.tolist() == branch.token_ids.tolist()
            assert one.logprob[one.is_sampled].tolist() == branch.behavior_logprobs[branch.action_mask].tolist()
            assert np.isnan(one.logprob[~one.is_sampled]).all()
            sampled = one.trained_logprob[one.is_sampled]
            assert np.isnan(sampled).all() if step == 1 else sampled.tolist() == list(range(len(sampled)))


def test_metrics_leave_out_a_line_that_a_crash_cut_off(folder: Path) -> None:
    found = [(one.step, one.name, one.value) for one in metric_rows(Past(folder))]
    assert found == [(1, "gspo/loss", 0.5), (2, "gspo/loss", -0.25), (2, "reward/mean", 1.0)]


def test_parquet_holds_every_row(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["tables", str(folder), "--to", str(tmp_path / "out"), "--tokens"]) == 0
    assert f"episodes.parquet: {STEPS * GROUPS * SIZE} rows" in capsys.readouterr().out
    past = Past(folder)
    batches = [past.batch(step) for step in range(1, STEPS + 1)]
    steps, episodes, tokens, metrics = (
        parquet.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("steps", "episodes", "tokens", "metrics")
    )
    assert steps["step"].to_pylist() == [1, 2, 3]
    assert steps["settings"].to_pylist() == ["{}"] * STEPS
    expected = [one for batch in batches for one in episode_rows(past, batch)]
    assert episodes["reward"].to_pylist() == [one.reward for one in expected]
    assert [dict(one) for one in episodes["reward_parts"].to_pylist()] == [one.reward_parts for one in expected]
    columns = [one for batch in batches for one in token_columns(past, batch)]
    assert tokens["token"].to_numpy().tolist() == np.concatenate([one.token for one in columns]).tolist()
    assert np.array_equal(
        tokens["logprob"].to_numpy(), np.concatenate([one.logprob for one in columns]), equal_nan=True
    )
    assert tokens["member"].to_pylist() == [one.member for one in columns for _ in one.token]
    assert metrics.num_rows == 3
    assert main(["tables", str(folder), "--to", str(tmp_path / "out")]) == 1
    assert "is there already" in capsys.readouterr().err


def test_the_files_are_all_there_or_none_is(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    assert main(["tables", str(folder), "--to", str(tmp_path / "out"), "--last", "9"]) == 1
    assert "the batch log of step 4 is not kept" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert main(["tables", str(folder), "--to", str(tmp_path / "out")]) == 0


def test_an_episode_in_which_nothing_was_sampled_has_no_versions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its environment could not begin: it is a member of its group all the same."""
    parquet = pytest.importorskip("pyarrow.parquet")
    copied = Path(shutil.copytree(folder, tmp_path / "job_a"))
    batch = Past(copied).batch(2)
    group = batch.groups[0]
    kinds = {"token_ids": np.int32, "action_mask": bool, "behavior_logprobs": np.float32}
    nothing: dict[str, Any] = {name: np.zeros(0, kind) for name, kind in kinds.items()}
    end = group.trajectories[0].segments[-1]
    ended = replace(end, index=0, turn=0, outcome=Outcome(StopReason.ENV_ERROR), **nothing)
    groups = [replace(group, trajectories=(Trajectory((ended,)), *group.trajectories[1:])), *batch.groups[1:]]
    data = encode_batch(batch.position, groups, batch.extra)
    (copied / layout.BATCHES / layout.step_name(batch.position)).write_bytes(b"".join(data))
    assert main(["tables", str(copied), "--to", str(tmp_path / "out"), "--tokens"]) == 0, capsys.readouterr().err
    rows = parquet.read_table(tmp_path / "out" / "episodes.parquet").to_pylist()
    [row] = [row for row in rows if row["stop_reason"] == "env_error"]
    assert (row["first_version"], row["last_version"], row["max_staleness"]) == (None, None, None)
    assert (row["reward"], row["sampled_tokens"]) == (None, 0)


def test_without_the_package_the_message_names_the_extra(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; from gspo_core.cli import main; "
        f"sys.exit(main(['tables', {str(folder)!r}, '--to', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gspo[parquet]" in done.stderr, done.stderr
