"""The grid of baselines: cells are jobs that differ in what they name, the harness tells the truth about versions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.baselines import alarms, world
from benchmarks.baselines.__main__ import cost, missing, run, wanted
from benchmarks.baselines.cells import BOUNDED, CELLS, HELD_OUT, RUNNABLE, SEEDS, SIZES, SUSTAINED, WORLDS, Sizes, cell
from benchmarks.baselines.falls import collapsed, paired
from benchmarks.baselines.falls import write as write_falls
from benchmarks.baselines.play import Ages, Task, context_length, play
from benchmarks.baselines.pooled import bounded_runs, highest_share
from benchmarks.baselines.pooled import write as write_pooled
from benchmarks.baselines.report import RESULTS, area, rows, write
from benchmarks.baselines.sampler import DenseSampler
from benchmarks.baselines.store import Store
from benchmarks.baselines.sustained import write as write_sustained
from benchmarks.baselines.training import Result, attribute, without_failures
from environments import calculator, search_qa
from examples.demo.model import School
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import PlainEnvironment, load_environment
from gspo_core.log.sequences import train_batch
from gspo_core.starter.untrained import write_untrained
from gspo_core.types import Split

TINY = Sizes(steps=2, groups_per_step=2, group_size=2, eval_tasks=3, eval_every=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained: it babbles, which is enough to be sampled and trained."""
    directory = tmp_path_factory.mktemp("baselines") / "dense"
    write_untrained(directory, School(directory, 0).codec, 0)
    return directory


def test_cells_are_jobs_that_differ_in_what_they_name() -> None:
    assert len({one.name for one in RUNNABLE}) == len(RUNNABLE)
    jobs = {one.name: one.job(Path("model"), 0) for one in RUNNABLE}
    named = {"objective": True, "learner": True, "steps": True, "rollout": {"max_staleness", "staleness_cap"}}
    named |= {
        "optimizer": {"lr", "max_grad_norm", "max_grad_growth", "max_step_k3", "ess_scaling", "signal_scaling", "betas"}
    }
    shared = [job.model_dump(exclude=named) for job in jobs.values()]
    assert [job.steps for job in jobs.values()] == [one.num_steps(SIZES) for one in RUNNABLE]
    assert len({jobs[one.name].optimizer.model_dump_json() for one in CELLS}) == 1
    default = jobs["long_gspo_s16"]
    kinds = [(jobs[one.name].optimizer, jobs[one.name].objective) for one in BOUNDED]
    assert (default.optimizer, default.objective) not in kinds
    # Sustained cells are evaluated with more tasks, all of them alike, and are the others' equals in all else.
    evaluations = [job.pop("evaluation") for job in shared]
    sustained = [found for found, one in zip(evaluations, RUNNABLE, strict=True) if one in SUSTAINED]
    others = [found for found, one in zip(evaluations, RUNNABLE, strict=True) if one not in SUSTAINED]
    assert all(one == others[0] for one in others)
    assert [found.pop("tasks") for found in sustained] == [HELD_OUT[one.model] for one in SUSTAINED]
    assert all(one | {"tasks": 100} in ({**others[0], "every": every} for every in (12, 16, 24)) for one in sustained)
    worlds = [(one.model if one.model in WORLDS else "", one.groups_per_step) for one in RUNNABLE]
    for kind in set(worlds):
        alike = [job for job, one in zip(shared, worlds, strict=True) if one == kind]
        assert all(job == alike[0] for job in alike)
    distinct = {
        (one.model, one.attribution, one.only_successes, jobs[one.name].model_dump_json(exclude={"model"}))
        for one in RUNNABLE
    }
    assert len(distinct) == len(RUNNABLE), "two cells compute the same"


@pytest.mark.parametrize("theirs", [calculator.Calculator, search_qa.SearchQA])
def test_a_world_without_threads_is_the_one_with_them(theirs: type) -> None:
    ours, theirs = (load_environment(f"{module}:{theirs.__name__}") for module in (world.__name__, theirs.__module__))
    assert isinstance(ours, PlainEnvironment)
    assert isinstance(theirs, PlainEnvironment)
    assert ours.tools == theirs.tools
    assert ours.system_prompt == theirs.system_prompt
    assert ours.limits == theirs.limits


def test_every_token_has_the_log_prob_of_the_version_that_is_said_to_have_sampled_it(
    model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_untrained(other, School(other, 0).codec, 1)
    spec = cell("gspo_s4").job(model, 0, TINY)
    sampler = DenseSampler(model, context_length(spec))
    sampler.add(0, model)
    sampler.add(1, other)
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


@pytest.mark.slow
def test_an_age_that_is_sustained_stays_what_it_is_said_to_be(model: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "dense").symlink_to(model)
    old = dataclasses.replace(cell("sustained_gspo_s16"), staleness=3, eval_tasks=2, eval_every=4, judged_at=(6, 8))
    fading = dataclasses.replace(old, name="fading", schedule="halving", judged_at=())

    def prepare(work: Path, kind: str) -> Path:
        return work / "models" / kind

    run(tmp_path, [old, fading], [0], sizes=TINY, prepare=prepare)
    store = Store(tmp_path)
    stored, other = store.read(old, 0, TINY), store.read(fading, 0, TINY)
    assert stored is not None
    assert other is not None
    assert stored.result.steps["staleness/within_one"] == [0.0, 0.0, *[1.0] * 6]
    assert other.result.steps["staleness/within_one"] != stored.result.steps["staleness/within_one"]
    assert [step for step, _ in stored.result.evaluations] == [0, 4, 6, 8]
    assert store.read(dataclasses.replace(old, judged_at=(8,)), 0, TINY) is None, "other conditions"
    assert "0 runs are missing" in cost(store, [old], [0], TINY)


class Stored(Protocol):
    def __call__(self, name: str, seed: int, *curve: float) -> None: ...


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """Leaves a run of a cell that lasts."""
    store = Store(tmp_path)

    def leave(name: str, seed: int, *curve: float) -> None:
        evaluations = [(24 * place, value) for place, value in enumerate(curve)]
        steps: dict[str, list[float | None]] = {
            "staleness/within_one": [0.2, 0.95, 1.0],
            "staleness/mean": [3.0, 15.0, 16.0],
            "gspo/kept_frac": [1.0, 0.5, 0.9],
            "gspo/k3_proximal_behavior": [0.0, 0.1, 0.02],
            "episodes/turns_mean": [2.0, 3.0, 4.0],
            "episodes/actions_mean": [20.0, 30.0, 34.0],
        }
        store.write(cell(name), seed, SIZES, Result(evaluations, steps, {"all": 60.0}, 0.0))

    return leave


def test_what_an_age_costs_is_told_beside_the_same_seed_on_fresh_data(stored: Stored, tmp_path: Path) -> None:
    for seed, fall in ((1, 0.0), (2, 0.02)):
        stored("sustained_gspo_s0", seed, 0.4, 0.9, 0.9, 0.9, 0.9)
        stored("sustained_gspo_s16", seed, 0.4, 0.9, 0.9 - fall, 0.8 - fall, 0.7 - fall)
        stored("sustained_grpo_s16", seed, 0.4, 0.6, 0.9, 0.9, 0.9)
    for seed in (1, 2):
        stored("sustained_gspo_s0_cashbook", seed, 0.5, 0.7, 0.7, 0.7)
        stored("sustained_successes_s0_cashbook", seed, 0.5, 0.6, 0.5, 0.5)
    page = write_sustained(tmp_path, tmp_path)
    long = (tmp_path / "sustained_cashbook.md").read_text()
    assert long.startswith("# Data that stay 16 steps old, in long episodes that successes alone do not teach\n")
    assert "| Successes alone less all on fresh data | 2 | -16.7 ± 0.0 |" in long
    old = next(line.split(" | ") for line in page.splitlines() if line.startswith("| GSPO, max_grad_growth: 1, age 16"))
    assert old[2].startswith("79.0% (78.0% to 80.0%)")
    assert old[4] == "1: 7 2: 7", "86.7 to 80.0 %, and 85.3 to 78.0 %"
    assert old[5] == "**20** **22**"
    assert old[6] == "15.5 in 2 steps"
    # 10 and 12 of 50 points
    assert "The age costs 22.0 ± 25.4 % of the gain on fresh data: not told from 5 %." in page
    assert "| GSPO at age 16 less GRPO at age 16 | 2 | -11.0 ± 12.7 |" in page
    assert (tmp_path / "sustained.png").stat().st_size > 10_000
    assert not (tmp_path / "sustained_long.md").exists()


def test_each_age_that_lasts_has_a_page_of_its_own(stored: Stored, tmp_path: Path) -> None:
    for seed in (1, 2):
        stored("sustained_gspo_s16", seed, 0.4, 0.9, 0.9, 0.9, 0.9)
        stored("sustained_gspo_s0", seed, 0.4, 0.7, 0.7, 0.7, 0.7)
        stored("sustained_gspo_s64_long", seed, 0.4, 0.9, 0.8, 0.8, 0.8)
        stored("sustained_gspo_s0_long", seed, 0.4, 0.9, 0.9, 0.9, 0.9)
    write_sustained(tmp_path, tmp_path)
    page = (tmp_path / "sustained_long.md").read_text()
    assert page.startswith("# Data that stay 64 steps old")
    assert "320, 328, 336 each task" in page
    assert "The age costs 20.0 ± 0.0 % of the gain on fresh data: more than 15 %." in page
    assert "age 16" not in page
    write_sustained(tmp_path, tmp_path, called="_again")
    again = (tmp_path / "sustained_long_again.md").read_text()
    assert again.startswith("# Data that stay 64 steps old, from another warm start\n")
    assert "](sustained_long_again.png)" in again


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


def test_falls_are_told_by_seed_and_compared_with_the_default_of_the_same_seeds(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def stored(name: str, seed: int, *curve: float) -> None:
        evaluations = [(24 * place, value) for place, value in enumerate(curve)]
        far: list[float | None] = [0.5, *[None] * 12, 0.25, 0.01]
        norms: list[float | None] = [9.0] * 12 + [0.1, 0.2, 0.3]
        steps = {
            "gspo/k3_policy_proximal": far,
            "learner/grad_norm": norms,
            "learner/grad_norm_max": [*norms[:-1], 4.0],
            "learner/num_idle_sequences": [12.0] * 15,
        }
        result = Result(evaluations, steps, {"all": 1.0}, 0.0)
        store.write(cell(name), seed, SIZES, result)

    stored("long_gspo_s16", 7, 0.4, 0.9, 0.3)
    stored("long_gspo_s16", 8, 0.4, 0.9, 0.9)
    for name in ("long_gspo_s16", "bounded_growth_1_s16"):
        stored(name, 16, 0.4, 0.9, 0.9)
    stored("bounded_growth_1_s16", 7, 0.4, 0.9, 0.9)
    stored("bounded_growth_1_s16", 8, 0.4, 0.9, 0.9)
    stored("bounded_growth_1_s16", 9, 0.4, 0.9, 0.84)
    page = write_falls(tmp_path, tmp_path)
    default, bounded = (line.split(" | ") for line in page.splitlines() if " runs" not in line and "7: " in line)
    assert default[1:5] == ["3", "70% (30% to 90%)", "1", "1"]
    assert default[5:9] == ["7: **60** 8: 0 16: 0", "0.25 (0.25)", "20 (20)", "25%"]
    assert bounded[3:6] == ["0", "0", "7: 0 8: 0 9: 6 16: 0"]
    assert bounded[9].startswith("-30.0 ± "), "the mean of 60 and 0, without the seed that the bound was chosen on"
    assert bounded[10].startswith("+30.0 ± ")
    assert bounded[10].endswith("(2 seeds)")
    assert "| 9 | 40 90 84 |" in page
    other = write_falls(tmp_path, tmp_path, name="other", beside="bounded_growth_1_s16")
    assert "--name other --beside bounded_growth_1_s16`" in other
    assert next(line for line in other.splitlines() if "7: **60**" in line).split(" | ")[9].startswith("+30.0 ± ")
    assert paired([1.0, 3.0]) == (2.0, pytest.approx(12.71))


def test_a_cell_is_named_whole_or_by_how_names_begin() -> None:
    [one] = wanted(["sustained_gspo_s16"])
    assert one.name == "sustained_gspo_s16", "others begin so"
    names = [one.name for one in wanted(["sustained_gspo_s", "bounded_spread_s16"])]
    assert {"sustained_gspo_s16", "sustained_gspo_s16_fast", "bounded_spread_s16"} < set(names)
    assert all(name.startswith(("sustained_gspo_s", "bounded_spread_s16")) for name in names)
    assert wanted(["nothing"]) == []


@pytest.mark.parametrize(
    ("curve", "is_one"),
    [
        ((0.3, 0.9, 0.95, 0.81, 0.93, 0.95), False),  # a dent
        ((0.3, 0.9, 0.95, 0.92, 0.86, 0.8), True),  # at its end
        ((0.3, 0.9, 0.94, 0.92, 0.6, 0.7, 0.9, 0.93), True),  # long, though it came back
        ((0.3, 0.9, 0.95, 0.93, 0.85, 0.85), False),  # by ten points, no more
    ],
)
def test_a_collapse_is_a_fall_that_does_not_come_back(curve: tuple[float, ...], is_one: bool) -> None:
    assert collapsed(curve) == is_one


def test_the_pooled_page_says_what_the_published_numbers_say(tmp_path: Path) -> None:
    for name in ("falls", "step_bounds", "signal_scaling", "baselines"):
        (tmp_path / f"{name}.json").symlink_to(RESULTS / f"{name}.json")
    page = write_pooled(tmp_path)
    assert page == (RESULTS / "pooled.md").read_text(encoding="utf-8")
    found = bounded_runs(tmp_path)
    assert {1, 16} < {run.seed for run in found}
    assert len({run.seed for run in found} - {1, 16, 8819}) >= 50
    assert not any(run.has_collapsed for run in found)
    assert highest_share(59) == pytest.approx(0.05, abs=0.001), "the rule of three"


def test_the_page_of_alarms_says_what_the_published_numbers_say(tmp_path: Path) -> None:
    for name in alarms.SERIES:
        (tmp_path / f"{name}.json").symlink_to(RESULTS / f"{name}.json")
    assert alarms.write(tmp_path) == (RESULTS / "alarms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("curve", "after", "worth"),
    [
        ((0.5, 0.9, 0.95, 0.6, 0.9), [10], "warned"),
        ((0.5, 0.9, 0.95, 0.6, 0.9), [18], "at the fall"),
        ((0.5, 0.9, 0.95, 0.6, 0.9), [5, 20], "elsewhere"),
        ((0.5, 0.9, 0.95, 0.6, 0.9), [5], "elsewhere"),
        ((0.5, 0.9, 0.95, 0.6, 0.9), [], "never"),
        ((0.5, 0.9, 0.95, 0.86, 0.9), [20], "false"),
        ((0.5, 0.9, 0.95, 0.86, 0.9), [], "silent"),
        ((0.5, 0.9, 0.95, 0.86, 0.9), None, "unknown"),
    ],
)
def test_an_alarm_is_worth_what_it_says_in_time(curve: tuple[float, ...], after: list[int] | None, worth: str) -> None:
    run = alarms.Recorded("falls", "GSPO", 0, [(6 * place, value) for place, value in enumerate(curve)], {}, 100)
    assert alarms.Rung(run, after).kind == worth


def test_a_fall_rings_when_it_is_more_than_chance() -> None:
    def rung(*curve: float) -> list[int]:
        evaluations = [(6 * place, value) for place, value in enumerate(curve)]
        return alarms.fallen_evaluations(alarms.Recorded("falls", "GSPO", 0, evaluations, {}, 100))

    assert rung(0.3, 0.9, 0.8, 0.92) == []
    assert rung(0.3, 0.9, 0.7, 0.92) == [12]


def test_a_cell_that_learns_of_successes_alone_keeps_them_as_they_are(model: Path) -> None:
    spec = cell("gspo_s4").job(model, 0, TINY)
    environment, codec = load_environment(spec.environments[0].ref), HermesCodec(load_tokenizer(model))
    sampler = DenseSampler(model, context_length(spec))
    sampler.add(0, model)
    groups = play(spec, environment, codec, sampler, [Task(0, 0, Split.TRAIN, 2)], Ages(0, 0))
    sequence = train_batch(groups, np.zeros_like, spec.objective.advantage).sequences[0]
    good, bad = (dataclasses.replace(sequence, advantages=advantage) for advantage in (0.5, -0.5))
    assert [one.advantages for one in without_failures([good, bad])] == [0.5, 0.0]
