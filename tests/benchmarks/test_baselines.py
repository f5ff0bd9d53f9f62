"""The grid of baselines: cells are jobs that differ in what they name, the harness tells the truth about versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.baselines import world
from benchmarks.baselines.__main__ import missing, run
from benchmarks.baselines.cells import CELLS, SEEDS, SIZES, Sizes, cell
from benchmarks.baselines.play import CONTEXT_LENGTH, Ages, Task, play
from benchmarks.baselines.report import area, rows, write
from benchmarks.baselines.sampler import DenseSampler
from benchmarks.baselines.store import Store
from benchmarks.baselines.training import Result, attribute
from environments import calculator
from examples.demo.model import School, _write_untrained
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import PlainEnvironment, load_environment
from gspo_core.types import Split
from services.trainer.groups.sequences import train_batch

TINY = Sizes(steps=2, groups_per_step=2, group_size=2, eval_tasks=3, eval_every=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained: it babbles, which is enough to be sampled and trained."""
    directory = tmp_path_factory.mktemp("baselines") / "dense"
    _write_untrained(directory, School(directory, 0).codec, 0)
    return directory


def test_cells_are_jobs_that_differ_in_what_they_name() -> None:
    assert len({one.name for one in CELLS}) == len(CELLS)
    jobs = {one.name: one.job(Path("model"), 0) for one in CELLS}
    named = {"objective": True, "learner": True, "steps": True, "rollout": {"max_staleness", "staleness_cap"}}
    shared = [job.model_dump(exclude=named) for job in jobs.values()]
    assert [job.steps for job in jobs.values()] == [one.times * SIZES.steps for one in CELLS]
    assert all(one == shared[0] for one in shared)
    distinct = {(one.model, one.attribution, jobs[one.name].model_dump_json(exclude={"model"})) for one in CELLS}
    assert len(distinct) == len(CELLS), "two cells compute the same"


def test_the_world_without_threads_is_the_calculator() -> None:
    ours, theirs = (load_environment(f"{module}:Calculator") for module in (world.__name__, calculator.__name__))
    assert isinstance(ours, PlainEnvironment)
    assert isinstance(theirs, PlainEnvironment)
    assert ours.tools == theirs.tools
    assert ours.system_prompt == theirs.system_prompt
    assert ours.limits == theirs.limits


def test_every_token_has_the_log_prob_of_the_version_that_is_said_to_have_sampled_it(
    model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    _write_untrained(other, School(other, 0).codec, 1)
    sampler = DenseSampler(model, CONTEXT_LENGTH)
    sampler.add(0, model)
    sampler.add(1, other)
    spec = cell("gspo_s4").job(model, 0, TINY)
    environment, codec = load_environment(spec.environments[0].ref), HermesCodec(load_tokenizer(model))
    tasks = [Task(group, group, Split.TRAIN, 2) for group in range(3)]
    groups = play(spec, environment, codec, sampler, tasks, Ages(0, 1))
    trajectories = [trajectory for group in groups for trajectory in group]
    assert any(len(one.versions) == 2 for one in trajectories)
    for trajectory in trajectories:
        for branch in trajectory.branches:
            for version in trajectory.versions:
                scored = np.array([0.0, *sampler.score(version, [branch.token_ids.tolist()])[0]])
                mine = branch.action_mask & (branch.versions == version)
                np.testing.assert_allclose(branch.behavior_logprobs[mine], scored[mine], atol=2e-5)

    # version 0 is two steps old and version 1 is one

    def ages(versions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.asarray(2 - versions, np.int32)

    sequences = train_batch(groups, ages, spec.objective.advantage).sequences
    for which, version in (("oldest", 0), ("newest", 1)):
        for said, true in zip(attribute(sequences, 2, which, sampler), sequences, strict=True):  # type: ignore[arg-type]
            claimed = version if len(set(true.staleness[true.action_mask])) > 1 else 2 - int(true.staleness.max())
            scored = np.array([0.0, *sampler.score(claimed, [true.token_ids.tolist()])[0]])
            np.testing.assert_allclose(said.behavior_logprobs, np.where(true.action_mask, scored, 0), atol=2e-5)
            assert set(said.staleness) == {2 - claimed}

    again = play(spec, environment, codec, sampler, tasks, Ages(0, 1))
    assert [[one.branches[0].token_ids.tolist() for one in group] for group in again] == [
        [one.branches[0].token_ids.tolist() for one in group] for group in groups
    ]


def test_a_cell_runs_is_stored_and_is_not_run_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "dense").symlink_to(model)
    some, seeds = [cell("attribution_oldest_s16"), cell("gspo_s0")], [0]

    def prepare(work: Path, kind: str) -> Path:
        return work / "models" / kind

    assert run(tmp_path, some, seeds, sizes=TINY, prepare=prepare) == 2
    assert "attribution_oldest_s16 seed 0" in capsys.readouterr().out
    assert run(tmp_path, some, seeds, sizes=TINY, prepare=prepare) == 0
    stored = Store(tmp_path).read(some[0], 0, TINY)
    assert stored is not None
    assert [step for step, _ in stored.result.evaluations] == [0, 2]
    assert len(stored.result.steps["reward/mean"]) == 2
    assert stored.result.engine_difference < 1e-4
    longer = Sizes(steps=3, groups_per_step=2, group_size=2, eval_tasks=3, eval_every=2)
    assert len(list(missing(Store(tmp_path), some, seeds, longer))) == 2, "other sizes are other cells"


def test_what_is_missing_is_run_seed_by_seed_and_reported(tmp_path: Path) -> None:
    (first, second), aside = CELLS[:2], cell("mixture_gspo")
    store = Store(tmp_path)
    assert [(one.name, seed) for one, seed in missing(store, (aside, *CELLS[:2]), [0, 1], SIZES)] == [
        (first.name, 0),
        (second.name, 0),
        (first.name, 1),
        (second.name, 1),
        (aside.name, 0),
        (aside.name, 1),
    ]
    result = Result(
        evaluations=[(0, 0.2), (15, 0.9), (30, 0.6)],
        steps={"gspo/clip_frac": [0.1, None, 0.3]},
        seconds={"all": 1.0},
        engine_difference=0.0,
    )
    store.write(first, 0, SIZES, result)
    assert next(missing(store, CELLS[:2], [0, 1], SIZES))[0] == second
    page = write(tmp_path, tmp_path)
    assert f"**Missing**: {first.name} (1 of {len(SEEDS)}), {second.name} (0 of {len(SEEDS)})" in page
    (row,) = (row for row in rows(tmp_path) if row.runs)
    assert row.num_collapsed() == 1, "from 90 % to 60 %"
    assert row.steps_to_target() == [15]
    assert row.mean("gspo/clip_frac") == pytest.approx(0.2)
    assert area([(0, 0.0), (10, 1.0), (30, 1.0)]) == pytest.approx(25 / 30)
    assert (tmp_path / "baselines.png").stat().st_size > 10_000
