"""A log ratio is split into what caused it, exactly, with the weights of every version rebuilt from the logs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gspo_core.cli import main
from gspo_core.learner import Learner
from gspo_core.log import layout
from gspo_core.log.batches import encode_batch
from gspo_core.log.settings import learner_config
from gspo_core.log.steps import logged_sequences
from gspo_core.replay.past import Past
from gspo_core.replay.splitting import PARTS, StepSplit, as_text, k3, split_ratio, split_step
from gspo_core.types import Group, Trajectory
from tests.core.learner_support import write_model
from tests.core.past_kit import MadePast, make_past, spec_of

STEP = 4


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    folder = tmp_path_factory.mktemp("jobs")
    return make_past(folder / "job_a", spec_of(write_model(folder / "model")), steps=STEP)


@pytest.fixture(scope="module")
def split(past: MadePast) -> StepSplit:
    return split_step(Past(past.folder), STEP)


def test_a_ratio_by_hand() -> None:
    """The engine was 0.1 off, two steps moved the token by 0.3 and then back by 0.2, the update by 0.05."""
    columns = (-1.0, -1.1), (-1.1, -1.1), (-0.8, -1.3), (-0.75, -1.25)
    parts = split_ratio(*(np.array(column) for column in columns))
    np.testing.assert_allclose(parts.mismatch, [-0.1, 0.0])
    np.testing.assert_allclose(parts.staleness, [0.3, -0.2])
    np.testing.assert_allclose(parts.update, [0.05, 0.05])
    np.testing.assert_allclose(parts.total, [0.25, -0.15])


def test_k3_by_hand() -> None:
    assert k3(np.array([0.0, np.log(2.0)])) == pytest.approx((1 - np.log(2)) / 2)
    assert k3(np.zeros(0)) == 0


def test_the_parts_are_those_of_the_published_weights(past: MadePast, split: StepSplit) -> None:
    """Versions as they were published, loaded by themselves, say the same as those that were rebuilt."""
    opened = Past(past.folder)
    train = logged_sequences(opened.whole_batch(STEP), past.spec.objective.advantage)
    found: dict[int, list[np.ndarray]] = {}
    for version in (STEP - 2, STEP - 1):
        weights = opened.weights(version)
        assert weights is not None
        learner = Learner(weights, learner_config(past.spec), past.spec.training_objective, seed=0)
        rows = zip(learner.logprobs(train.sequences), train.sequences, strict=True)
        found[version] = [row[one.action_mask] for row, one in rows]
    acting = [index for index, one in enumerate(train.sequences) if np.any(one.advantages)]
    versions = [one.versions[one.action_mask] for episode in train.episodes for one in episode.branches]
    told = np.concatenate(
        [train.sequences[index].behavior_logprobs[train.sequences[index].action_mask] for index in acting]
    )
    under = np.concatenate(
        [np.where(versions[index] == STEP - 2, found[STEP - 2][index], found[STEP - 1][index]) for index in acting]
    )
    proximal = np.concatenate([found[STEP - 1][index] for index in acting])
    np.testing.assert_allclose(split.parts.mismatch, under.astype(float) - told, atol=1e-5)
    np.testing.assert_allclose(split.parts.staleness, proximal.astype(float) - under, atol=1e-5)
    assert split.num_left_out == 0


def test_fresh_tokens_have_no_staleness_and_old_ones_do(split: StepSplit) -> None:
    fresh, old = split.by_age()[0], split.by_age()[1]
    assert not fresh.staleness.any()
    assert np.abs(old.staleness).max() > 1e-3
    assert fresh.mismatch.std() == pytest.approx(0.01, rel=0.3)  # how far the made engine is off
    assert np.abs(split.parts.update).max() > 1e-4


def test_versions_that_are_no_longer_kept_are_rebuilt(past: MadePast, split: StepSplit, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(past.folder, tmp_path / "job_a"))
    shutil.rmtree(folder / layout.WEIGHTS)
    again = split_step(Past(folder), STEP)
    for name in PARTS:
        np.testing.assert_array_equal(getattr(again.parts, name), getattr(split.parts, name))


def test_tokens_of_a_version_that_the_history_left_are_counted_and_left_out(
    past: MadePast, split: StepSplit, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(past.folder, tmp_path / "job_a"))
    (folder / layout.VERSIONS / layout.numbered_name(STEP - 2)).unlink()
    rest = split_step(Past(folder), STEP)
    assert set(rest.version) == {STEP - 1}
    assert rest.num_left_out > 0
    assert len(rest.version) == (split.version == STEP - 1).sum()


@pytest.mark.parametrize("more", [0, 1], ids=["known numbers", "a number of this very step"])
def test_tokens_that_another_job_sampled_are_left_out_whatever_their_versions_are_called(
    past: MadePast, split: StepSplit, tmp_path: Path, more: int
) -> None:
    """A fork that is fed batches, and a retrained job, have versions of the same numbers and other weights."""
    folder = Path(shutil.copytree(past.folder, tmp_path / "job_a"))
    batch = Past(folder).batch(STEP)
    groups = [of_another_job(group, more) for group in batch.groups]
    ages = {str(int(version) + more): age for version, age in batch.extra["staleness"].items()}
    data = encode_batch(batch.position, groups, {**batch.extra, "staleness": ages})
    (folder / layout.BATCHES / layout.step_name(batch.position)).write_bytes(b"".join(data))
    rest = split_step(Past(folder), STEP)
    assert (rest.num_left_out, len(rest.version), rest.by_age()) == (len(split.version), 0, {})
    assert list(as_text(rest))[-1].startswith(f"{rest.num_left_out} tokens are by versions")


def of_another_job(group: Group, more: int) -> Group:
    """``more``: by how much its numbers of versions are higher."""
    episodes = [
        [replace(one, key=replace(one.key, job="job_b"), version=one.version + more) for one in episode.segments]
        for episode in group
    ]
    return replace(group, job="job_b", trajectories=tuple(Trajectory(tuple(segments)) for segments in episodes))


def test_the_command_says_it(past: MadePast, split: StepSplit, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"{past.folder}@{STEP}"
    assert main(["replay", where, "--split-ratio", "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)
    together = record["all"]["together"]
    assert together["mean"] == pytest.approx(split.parts.total.mean())
    assert together["mean"] == pytest.approx(
        sum(record["all"][name]["mean"] for name in ("mismatch", "staleness", "update"))
    )
    assert main(["replay", where, "--split-ratio"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        *([str(age), str(len(parts.update))] for age, parts in split.by_age().items()),
        ["all", str(len(split.version))],
    ]
    assert main(["replay", where, "--split-ratio", "--influence"]) != 0
