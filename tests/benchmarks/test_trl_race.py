"""The race beside TRL: one job decides what both sides do, and what cannot be told to TRL is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race.by_steps import crossing, over_all_steps, page
from benchmarks.race.clock import CpuTime
from benchmarks.race.setting import CannotRace, RaceSetting, trl_arguments, trl_rows
from environments import calculator
from examples.demo.demo import JOB_FILE
from examples.demo.demonstrations import COURSE
from gspo_core.env import load_environment
from gspo_core.job_spec import JobSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split


def job(**changes: Any) -> JobSpec:
    """The demo's, with some keys changed; nested ones are merged."""
    given = load_job_spec(JOB_FILE).model_dump(mode="json", exclude_unset=True) | {"seed": 0}
    for key, value in changes.items():
        given[key] = given.get(key, {}) | value if isinstance(value, dict) else value
    return JobSpec.model_validate(given)


def told(spec: JobSpec) -> dict[str, Any]:
    return trl_arguments(RaceSetting.of(spec))


def test_trl_is_told_what_the_job_of_the_demo_says() -> None:
    spec, arguments = job(), told(job())
    assert (arguments["importance_sampling_level"], arguments["loss_type"]) == ("sequence", "grpo")
    assert arguments["learning_rate"] == spec.optimizer.lr
    assert arguments["lr_scheduler_type"] == spec.optimizer.schedule
    assert (arguments["epsilon"], arguments["epsilon_high"]) == (spec.objective.clip_low, spec.objective.clip_high)
    assert arguments["num_generations"] == spec.rollout.group_size
    episodes = arguments["per_device_train_batch_size"] * arguments["steps_per_generation"]
    assert episodes == spec.groups_per_step * spec.rollout.group_size
    assert arguments["max_steps"] == spec.steps * spec.objective.minibatches


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({"optimizer": {"lr": 3e-5}}, {"learning_rate": 3e-5}),
        ({"optimizer": {"schedule": "constant"}}, {"lr_scheduler_type": "constant"}),
        ({"optimizer": {"weight_decay": 0.1}}, {"weight_decay": 0.1}),
        ({"optimizer": {"betas": [0.8, 0.9]}}, {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"optimizer": {"max_grad_norm": None}}, {"max_grad_norm": 0.0}),
        ({"objective": {"clip_low": 0.01, "clip_high": 0.02}}, {"epsilon": 0.01, "epsilon_high": 0.02}),
        (
            {"objective": {"minibatches": 2}},
            {"per_device_train_batch_size": 32, "steps_per_generation": 2, "max_steps": 120},
        ),
        ({"groups_per_step": 4}, {"per_device_train_batch_size": 8}),
        ({"rollout": {"group_size": 4}}, {"num_generations": 4, "per_device_train_batch_size": 8}),
        ({"sampling": {"temperature": 0.5}}, {"temperature": 0.5}),
        ({"sampling": {"max_new_tokens": 32}}, {"generation_kwargs": {"max_new_tokens": 32}}),
        ({"limits": {"max_turns": 3}}, {"max_tool_calling_iterations": 2}),
        ({"steps": 10}, {"max_steps": 40}),
        ({"seed": 7}, {"seed": 7}),
    ],
)
def test_what_changes_in_the_job_changes_for_trl_and_nothing_else(
    changes: dict[str, Any], follows: dict[str, Any]
) -> None:
    assert told(job(**changes)) == told(job()) | follows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": {"kl_coef": 0.1}}, "kl_coef"),
        ({"objective": {"advantage": {"scale": "none"}}}, "advantage"),
        ({"optimizer": {"warmup_steps": 3}}, "optimizer"),
        ({"objective": {"minibatches": 3}}, "minibatches"),
        ({"environments": [{"ref": "environments.search_qa:SearchQA"}]}, "environments"),
    ],
)
def test_what_trl_cannot_be_told_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CannotRace, match=named):
        told(job(**changes))


async def test_trl_reads_the_prompts_that_a_policy_reads_here() -> None:
    environment, rows = load_environment(COURSE.environment), trl_rows()
    assert [row["expression"] for row in rows] == [task["expression"] for task in calculator.Calculator.tasks]
    for index in (0, len(rows) - 1):
        session = environment.session()
        start = await session.start(await environment.task(Split.TRAIN, index), 0)
        assert rows[index]["prompt"] == list(start.messages)
        await session.close()


def test_processor_time_is_read_between_two_looks(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    path.write_text('{"at": 10, "by": {"a": 1, "b": 1}}\n{"at": 20, "by": {"a": 3, "b": 5}}\n')
    cpu = CpuTime(path)
    assert [cpu.at(moment) for moment in (5, 10, 15, 20, 30)] == [2, 2, 5, 8, 8]
    assert cpu.by_process(10, 20) == {"b": 4, "a": 2}


def test_who_has_ended_by_the_next_look_is_not_counted_as_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    looks = [(0, {"parent": 0, "child": 0}), (10, {"parent": 1, "child": 9}), (11, {"parent": 10})]
    path.write_text("".join(json.dumps({"at": at, "by": by}) + "\n" for at, by in looks))
    assert CpuTime(path).by_process(0, 10.5) == {"child": 9, "parent": 1}


def judged(*success: float) -> list[dict[str, float]]:
    return [{"step": step, "success": value} for step, value in enumerate(success)]


def test_a_target_is_reached_where_three_judgements_in_a_row_reach_it() -> None:
    assert crossing(judged(0.9, 0.9, 0.6, 0.9, 0.9, 0.9, 0.9), 0.9) == 4, "what was before training counts for nothing"
    assert crossing(judged(0.2, 0.95, 0.7, 0.75, 0.9), 0.8) == 2, "the mean of the three counts, not each of them"
    assert crossing(judged(0.2, 0.5, 0.95, 0.95), 0.9) is None
    assert crossing(judged(0.2, 0.95), 0.9) is None


def test_the_page_by_steps_compares_the_sides_of_each_seed() -> None:
    def race(trl: list[float], ours: list[float]) -> dict[str, Any]:
        setting = asdict(RaceSetting.of(job()))
        return {"setting": setting, "trl": {"points": judged(*trl)}, "ours": {"points": judged(*ours)}}

    steady, late = [0.2, *[0.8] * 8], [0.2, 0.2, 0.2, *[0.8] * 6]
    found = {
        "races": {"1": race(steady, late), "2": race(steady, late), "3": race(late, late)},
        "versions": {"trl": "9.9.9"},
        **{"tasks": 10, "episodes_per_task": 2, "judged_at": [1, 2], "commit": "abc", "date": "2026-01-01"},
    }
    assert over_all_steps(judged(*late)) == pytest.approx((0.2 + 0.2 + 0.5 + 5 * 0.8) / 8)
    told = page(found)
    assert "| 1 | 20.0% | 76.2% | 61.2% | 2 | 4 | never | never | never | never |" in told
    assert "80%: 1.59 times TRL's steps" in told
    assert "3 of 3 seeds, 95 %), 4 for 2 steps in the median; never reached by TRL in 0" in told
    assert "The aim of 1.2 is NOT met" in told
    assert "90%: reached by both in 0 of 3 seeds." in told
