"""The job specification: what is accepted, what is refused, what is warned about, and that all of it is described."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gspo_core.documented import Documented, field_docs
from gspo_core.log.settings import learner_config
from gspo_core.problems import problems
from gspo_core.spec import EpisodeLimits, JobSpec, Limits, RolloutSpec, spec_warnings
from gspo_core.spec_file import SpecFileError, load_job_spec
from gspo_core.spec_sizes import size_problems

MINIMAL: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "environments": [{"ref": "environments.calculator:Calculator"}]}


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(MINIMAL | changes)


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        spec_of(**changes)
    return " | ".join(problem.message for problem in problems(caught.value, JobSpec, MINIMAL | changes))


def test_minimal_job_has_the_documented_defaults():
    spec = spec_of()
    assert spec.objective.ratio == "sequence"
    assert (spec.objective.clip_low, spec.objective.clip_high) == (3e-4, 4e-4)
    assert (spec.rollout.group_size, spec.rollout.max_staleness, spec.rollout.staleness_cap) == (8, 4, 16)
    assert spec.rollout.on_stale == "mask"
    assert spec.sampling.temperature == 1.0
    assert spec.evaluation is None
    assert spec_warnings(spec) == []


def test_the_request_of_the_reference_is_accepted_as_it_stands_there():
    spec = JobSpec.model_validate(
        {
            "name": "inventory",
            "model": "Qwen/Qwen3-0.6B",
            "environments": [
                {
                    "ref": "inventory.py:Inventory",
                    "weight": 1,
                    "limits": {"max_turns": 8, "step_timeout_s": 20, "episode_timeout_s": 300},
                }
            ],
            "objective": {"name": "gspo", "clip": [3e-4, 4e-4]},
            "rollout": {"group_size": 8, "max_staleness": 4, "on_partial_group": "min_viable:6"},
            "optimizer": {"lr": 1e-6},
            "steps": 200,
            "groups_per_step": 8,
            "checkpoint_every": 20,
            "sampling": {"temperature": 1.0, "max_new_tokens": 512},
            "metadata": {"owner": "me"},
        }
    )
    assert spec.rollout.min_group_size == 6
    assert spec.episode_limits(0).max_turns == 8


def test_importance_sampling_level_is_another_name_of_the_ratio():
    spec = spec_of(objective={"importance_sampling_level": "token", "clip": [0.2, 0.27]})
    assert spec.objective.ratio == "token"


def test_a_specification_survives_the_wire_unchanged():
    spec = spec_of(
        objective={"name": "grpo", "clip": [0.2, 0.28]},
        evaluation={"tasks": 5},
        limits={"on_parse_error": {"feedback": 1}},
        rollout={"max_staleness": 0},
    )
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_specifications_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        spec_of().steps = 3  # type: ignore[misc]


# Cross-field rules


@given(st.integers(0, 1000))
def test_staleness_cap_follows_max_staleness(max_staleness: int):
    assert RolloutSpec(max_staleness=max_staleness).staleness_cap == 4 * max_staleness


def test_staleness_cap_below_what_admission_lets_in_is_refused():
    assert "staleness_cap (3) must not be below max_staleness (4)" in refusal(rollout={"staleness_cap": 3})
    assert spec_of(rollout={"staleness_cap": 4}).rollout.staleness_cap == 4


def test_min_viable_beyond_the_group_is_refused():
    assert "asks for 9 members, but group_size is 8" in refusal(rollout={"on_partial_group": "min_viable:9"})
    assert spec_of(rollout={"on_partial_group": "min_viable:8"}).rollout.min_group_size == 8


@pytest.mark.parametrize("policy", ["some", "min_viable", "min_viable:0", "min_viable:-1", "min_viable:2x"])
def test_partial_group_policies_of_another_form_are_refused(policy: str):
    assert "rollout.on_partial_group" in refusal(rollout={"on_partial_group": policy})


def test_groups_too_small_for_a_baseline_are_refused():
    assert "objective.advantage.min_group_size" in refusal(rollout={"group_size": 1})
    changes = {"rollout": {"on_partial_group": "min_viable:2"}, "objective": {"advantage": {"min_group_size": 4}}}
    assert "objective.advantage.min_group_size" in refusal(**changes)


def test_two_staleness_caps_that_differ_are_refused():
    assert "contradicts rollout.staleness_cap (16)" in refusal(objective={"staleness_cap": 3})
    assert spec_of().training_objective.staleness_cap == 16


def test_objectives_that_a_job_must_not_run_are_refused():
    one_sided = {"anchor": "behavior", "compensate": False}
    assert "allow_one_sided_clip" in refusal(objective=one_sided)
    assert spec_of(objective=one_sided | {"allow_one_sided_clip": True})


@pytest.mark.parametrize("top_p", [0.0, 0.95, 1.5, math.nan])
def test_sampling_that_the_recorded_log_probs_do_not_describe_is_refused(top_p: float):
    assert refusal(sampling={"top_p": top_p}).startswith("sampling.top_p: only 1 can be trained")
    assert spec_of(sampling={"top_p": 1}).sampling.top_p == 1


def test_a_schedule_without_steps_left_is_refused():
    optimizer = {"schedule": "linear", "warmup_steps": 50}
    assert "leaves none of the 50 steps" in refusal(optimizer=optimizer, steps=50)
    assert spec_of(optimizer=optimizer, steps=51)


def test_metadata_is_bounded():
    assert "at most 16 labels" in refusal(metadata={str(number): "" for number in range(17)})
    assert "characters" in refusal(metadata={"k" * 65: ""})
    assert "characters" in refusal(metadata={"k": "v" * 513})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_even_in_free_form_parts(value: float):
    assert "finite" in refusal(sampling={"temperature": value})
    environment = MINIMAL["environments"][0] | {"config": {"deep": [{"er": value}]}}
    assert "finite" in refusal(environments=[environment])


@pytest.mark.parametrize("model", ["", " ", " padded", "zero\x00"])
def test_models_that_cannot_be_names_are_refused(model: str):
    assert refusal(model=model).startswith("model:")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "./runs/with blank/model", "m"])
def test_models_are_directories_or_hub_names(model: str):
    assert spec_of(model=model).model == model


@pytest.mark.parametrize("ref", ["Calculator", "calculator@0", "calculator@x", "a b:C", "a:b-c", ":C", "a:"])
def test_references_without_a_class_are_refused(ref: str):
    assert refusal(environments=[{"ref": ref}]).startswith("environments[0].ref:")


# Problems in words


def test_unknown_keys_are_refused_with_what_was_meant():
    assert refusal(samplin={}) == "samplin is not a field; did you mean sampling?"
    assert "sampling.temprature is not a field; did you mean temperature?" in refusal(sampling={"temprature": 1})
    environment = MINIMAL["environments"][0] | {"limits": {"max_turn": 1}}
    assert "environments[0].limits.max_turn is not a field; did you mean max_turns" in refusal(
        environments=[environment]
    )
    assert "objective.ratoi is not a field; did you mean ratio?" in refusal(objective={"ratoi": "token"})


def test_missing_keys_are_named():
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({})
    found = problems(caught.value, JobSpec, {})
    assert [(problem.code, problem.key) for problem in found] == [
        ("missing_field", "model"),
        ("missing_field", "environments"),
    ]


def test_what_a_file_writes_as_a_list_is_called_a_list():
    assert refusal(optimizer={"betas": 0.9}) == "optimizer.betas: input should be a valid list (it is 0.9)"
    assert refusal(optimizer={"betas": [0.9]}) == "optimizer.betas: list has too few items"
    assert "list should have at most 2 items" in refusal(optimizer={"betas": [0.9, 0.9, 0.9]})


def test_rewards_come_late_for_agents_alone():
    assert refusal(rewards={"deadline_s": 60}).startswith("rewards.deadline_s: only agents have a key")
    agents = [{"ref": "a.py:run", "agent": {}}]
    idle = refusal(environments=agents, rewards={"on_late_reward": "train"})
    assert idle.startswith("rewards.on_late_reward: acts only on rewards that come late")
    assert "less than or equal to 1209600" in refusal(environments=agents, rewards={"deadline_s": 15 * 86400})


def test_a_job_says_how_its_trainer_computes():
    learner = spec_of(
        learner={"lora": {"rank": 8}, "activation_checkpointing": True, "micro_batch_tokens": 2048}
    ).learner
    assert (learner.lora.rank, learner.activation_checkpointing, learner.micro_batch_tokens) == (8, True, 2048)
    assert spec_of().learner.lora is None
    assert "learner.lora.rnak is not a field; did you mean rank?" in refusal(learner={"lora": {"rnak": 8}})
    assert "learner.optimizer is not a field" in refusal(learner={"optimizer": {"lr": 1e-6}})


def test_routing_replay_is_refused_where_nothing_can_be_replayed():
    assert spec_of(learner={"routing_replay": True}).learner.routing_replay
    for objective in ({"minibatches": 1}, {"anchor": "behavior"}):
        assert refusal(learner={"routing_replay": True}, objective=objective).startswith("learner.routing_replay:")


def test_adapters_are_published_of_additions_alone():
    rollout = {"weight_transport": "adapter"}
    assert spec_of(rollout=rollout, learner={"lora": {}}).rollout.weight_transport == "adapter"
    found = refusal(rollout=rollout)
    assert found.startswith("rollout.weight_transport: adapter publishes low-rank additions")
    assert "learner.lora" in found


def test_one_mistake_is_one_problem():
    # The cap's default could not be computed, and the list of environments has no valid member: echoes, not problems.
    assert refusal(rollout={"max_staleness": -1}).count("|") == 0
    assert refusal(environments=[{"ref": "X"}]).count("|") == 0


# Limits


def test_later_limits_win_and_defaults_fill_the_rest():
    spec = spec_of(
        limits={"max_turns": 5, "max_tool_calls": 6},
        environments=[MINIMAL["environments"][0] | {"limits": {"max_turns": 7}}, MINIMAL["environments"][0]],
    )
    author = {"max_turns": 3, "max_tool_calls": 4, "step_timeout_s": 1.5}
    assert spec.episode_limits(0, author) == EpisodeLimits(max_turns=7, max_tool_calls=6, step_timeout_s=1.5)
    assert spec.episode_limits(1, author) == EpisodeLimits(max_turns=5, max_tool_calls=6, step_timeout_s=1.5)
    assert spec_of().episode_limits(0) == EpisodeLimits()


def test_limits_of_an_author_are_checked_like_a_users():
    with pytest.raises(ValidationError):
        spec_of().episode_limits(0, {"max_turn": 3})


def test_limits_still_know_what_was_left_out_after_the_wire():
    spec = JobSpec.model_validate_json(spec_of().model_dump_json())
    assert spec.episode_limits(0, {"max_turns": 3}).max_turns == 3


def test_stated_defaults_of_limits_are_the_defaults_that_hold():
    docs = field_docs(Limits)
    assert [field.name for field in dataclasses.fields(EpisodeLimits)] == list(docs)
    defaults = dataclasses.asdict(EpisodeLimits())
    for name in docs.keys() - {"max_context_tokens", "on_parse_error"}:
        stated = re.search(r"Default (\w+)\.$", docs[name])
        assert stated is not None, name
        held = "none" if defaults[name] is None else defaults[name]
        assert stated[1] == (f"{held:g}" if isinstance(held, float | int) else held)
    assert "feedback 2, then end" in docs["on_parse_error"]


# What a name stands for


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, None),  # as a release before the name was stored left it
        ({"objective": {"loss": "clip", "ratio": "sequence"}}, None),
        ({"objective": {"name": "gspo"}}, 1),
        ({"objective": {"name": "gspo"}, "optimizer": {"max_grad_growth": 1.5}}, 1.5),
        ({"objective": {"name": "gspo"}, "optimizer": {"max_grad_growth": 0}}, 0),
        ({"objective": {"name": "grpo", "clip": 0.2}}, None),
        ({"objective": {"name": "grpo", "clip": 0.2}, "optimizer": {"max_grad_growth": 2}}, 2),
    ],
)
def test_gspo_by_its_name_bounds_gradients_where_the_job_does_not_say_how(changes: dict[str, Any], bound: float | None):
    stored = JobSpec.model_validate_json(spec_of(**changes).model_dump_json())
    assert learner_config(stored).optimizer.max_grad_growth == bound
    others = {"max_grad_growth"} if bound else None
    assert learner_config(stored).optimizer.model_dump(exclude=others) == stored.optimizer.model_dump(exclude=others)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "gspo"),
        ({"objective": {"clip": 0.05, "minibatches": 2}}, "gspo"),
        ({"objective": {"ratio": "token", "clip": 0.2}}, None),
        ({"objective": {"name": "grpo", "clip": 0.2}}, "grpo"),
        ({"objective": {"loss": "sapo"}}, None),
        ({"parent": {"job": "job_a", "step": 3}}, None),
        ({"recorded": {"job": "job_a"}}, None),
        ({"parent": {"job": "job_a", "step": 3}, "objective": {"name": "gspo"}}, "gspo"),
    ],
)
def test_a_new_job_is_named_by_its_loss_and_one_with_a_past_as_that_was(changes: dict[str, Any], name: str | None):
    assert spec_of(**changes).as_submitted().objective.name == name


OLD = {"rollout": {"max_staleness": 16}}


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        (OLD, True),
        (OLD | {"objective": {"name": "gspo"}, "optimizer": {"signal_scaling": None}}, True),
        (OLD | {"optimizer": {"signal_scaling": False}}, False),
        (OLD | {"optimizer": {"signal_scaling": True}, "objective": {"kl_coef": 0.1}}, True),
        (OLD | {"objective": {"kl_coef": 0.1}}, None),
        ({"rollout": {"max_staleness": 15}}, None),
        (OLD | {"objective": {"name": "grpo", "clip": 0.2}}, None),
        (OLD | {"parent": {"job": "job_a", "step": 3}, "objective": {"name": "gspo"}}, None),
        (OLD | {"recorded": {"job": "job_a"}, "objective": {"name": "gspo"}}, None),
    ],
)
def test_a_new_job_of_gspo_on_old_data_follows_the_signal_unless_it_says_otherwise(
    changes: dict[str, Any], scales: bool | None
):
    submitted = spec_of(**changes).as_submitted()
    assert submitted.optimizer.signal_scaling == scales
    stored = JobSpec.model_validate(submitted.model_dump(mode="json"))
    assert stored.as_submitted() == stored == submitted


def test_a_stored_job_has_its_name_where_release_0_2_0_reads_one():
    stored = spec_of(**{}).as_submitted().model_dump(mode="json")
    assert stored["objective"]["name"] == "gspo"
    assert "max_grad_growth" not in stored["optimizer"]
    assert "name" not in spec_of(**{}).model_dump(mode="json")["objective"]


# Warnings


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"objective": {"clip": 0.2}}, "objective.clip_low"),
        ({"objective": {"ratio": "token"}}, "objective.clip_low"),
        ({"objective": {"anchor": "behavior"}}, "objective.anchor"),
        ({"objective": {"minibatches": 1}}, "objective.minibatches"),
        ({"objective": {"correction": "none"}}, "objective.correction"),
        ({"limits": {"max_episode_tokens": 100}}, "limits.max_episode_tokens"),
        ({"rollout": {"max_staleness": 16}}, "optimizer.max_grad_growth"),
        (
            {"rollout": {"max_staleness": 16}, "objective": {"name": "gspo"}, "optimizer": {"max_grad_growth": 0}},
            "optimizer.max_grad_growth",
        ),
    ],
)
def test_legal_but_known_to_be_wrong_is_warned_about(changes: dict[str, Any], key: str):
    assert any(warning.startswith(key) for warning in spec_warnings(spec_of(**changes)))


def test_data_that_are_old_need_a_bound_of_the_gradient_and_others_do_not():
    grpo = {"name": "grpo", "clip": [0.2, 0.27]}
    assert spec_warnings(spec_of(rollout={"max_staleness": 16}, optimizer={"max_grad_growth": 1}, objective=grpo)) == []
    assert spec_warnings(spec_of(rollout={"max_staleness": 16}).as_submitted()) == []
    assert spec_warnings(spec_of(rollout={"max_staleness": 8})) == []


def test_what_follows_a_fall_needs_evaluations_to_see_it():
    evaluation = {"tasks": 10, "every": 5}
    assert spec_of(watchdog={"on_fall": "slow", "slow_by": 0.3}, evaluation=evaluation).watchdog.slow_by == 0.3
    for watchdog, reason in (({"on_fall": "go_back"}, "there is no evaluation"), ({"slow_by": 0.3}, "only acts with")):
        with pytest.raises(ValidationError, match=reason):
            spec_of(watchdog=watchdog)


def test_synchronous_jobs_need_no_correction():
    assert spec_warnings(spec_of(objective={"correction": "none"}, rollout={"max_staleness": 0})) == []


# Descriptions


def test_every_field_of_every_model_is_described():
    schema = JobSpec.model_json_schema()
    models = {"JobSpec": schema} | schema["$defs"]
    bare = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, shape in model.get("properties", {}).items()
        if len(shape.get("description", "")) < 4
    ]
    assert not bare
    assert len(models) > 8
    assert {"RolloutSpec", "SamplingSpec", "Limits", "ObjectiveConfig", "OptimizerConfig"} <= models.keys()


def test_a_field_without_a_docstring_has_no_description():
    class Bare(Documented):
        told: int = 1
        """Told."""
        silent: int = 2

    # A class inside a function has no docstrings to be found, so the module's own are the ones that count.
    assert field_docs(Bare) == {}
    assert field_docs(RolloutSpec)["group_size"].startswith("Episodes of one task")


@pytest.mark.parametrize("model", [JobSpec, RolloutSpec, Limits])
def test_models_describe_themselves(model: type[Documented]):
    assert model.model_json_schema()["description"]


def test_a_job_is_wholly_of_agents_or_wholly_of_environments():
    agent, world = {"ref": "agent.py:run", "agent": {}}, {"ref": "world.py:World"}
    assert JobSpec(model="m", environments=[agent, agent | {"agent": {"pull": True}}]).is_of_agents
    assert not JobSpec(model="m", environments=[world]).is_of_agents
    for pair, said in (([agent, world], r"\[0\] has an agent, but environments\[1\]"), ([world, agent], r"\[1\] has")):
        with pytest.raises(ValidationError, match=said):
            JobSpec(model="m", environments=pair)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"url": "https://a.example/", "command": ["run"]}, "give one of url, command and pull"),
        ({"url": "https://a.example/", "pull": True}, "give one of url, command and pull"),
        ({"url": "ftp://a.example/"}, "should match pattern"),
        ({"command": []}, "at least 1 item"),
        ({"command": ["a\0b"]}, "should match pattern"),
        ({"function": "run"}, "not permitted"),
    ],
)
def test_an_agent_is_started_in_exactly_one_way(agent: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        JobSpec(model="m", environments=[{"ref": "a.py:run", "agent": agent}])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"group_size": 10**9}}, "rollout.group_size may be at most 4,096, not 1,000,000,000"),
        ({"steps": 10**9}, "steps may be at most 10,000,000, not 1,000,000,000"),
        ({"groups_per_step": 10**6}, "groups_per_step may be at most 65,536, not 1,000,000"),
        ({"groups_per_step": 65_536, "rollout": {"group_size": 64}}, "20,971,520 episodes in flight"),
    ],
)
def test_sizes_that_no_installation_holds_are_refused_of_new_jobs_alone(changes: dict[str, Any], said: str):
    """An older release accepted them, and what it accepted stays readable."""
    (problem,) = size_problems(spec_of(**changes))
    assert said in problem.message


def test_a_file_of_absurd_sizes_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("model: m\nenvironments: [{ref: 'a:B'}]\nrollout:\n  group_size: 1000000000\n")
    with pytest.raises(SpecFileError, match=r"job.yaml:4: rollout.group_size may be at most 4,096"):
        load_job_spec(path)


def test_large_sizes_are_taken():
    assert size_problems(spec_of(groups_per_step=512, rollout={"group_size": 64}, steps=10**6)) == []
