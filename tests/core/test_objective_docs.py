"""What the page on the objective says is true: its code runs, and it names every key, metric and alarm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import drift_law
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective import AlarmKind, LossStats, ObjectiveConfig, alarms, loss_metrics
from gspo_core.objective_config import AdvantageConfig
from gspo_core.spec import JobSpec
from tests.core.learner_support import make_learner, make_sequences, with_behavior, write_model
from tests.core.objective_support import CONFIGS, random_example, run
from tests.core.test_objective_vectors import CASES, assert_equals, compute, expected_of, is_finite

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "objective.md").read_text()


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As one script, since later blocks use what earlier ones defined."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), "docs/objective.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "clip_low, clip_high: 0.0003/0.0004 on a token ratio" in printed
    assert "[1.154" in printed


def test_the_job_file_shows_the_defaults() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    environment = {"ref": "environments.calculator:Calculator"}
    spec = JobSpec.model_validate({"model": "m", "environments": [environment], **yaml.safe_load(block)})
    assert spec == JobSpec.model_validate({"model": "m", "environments": [environment]}).as_submitted()


def test_every_metric_of_the_learner_is_on_the_page(tmp_path: Path) -> None:
    learner = make_learner(write_model(tmp_path / "model"))
    holding = OptimizerConfig(lr=1e-3, max_step_k3=1e-9, ess_scaling=True, signal_scaling=True)
    held = make_learner(tmp_path / "model", optimizer=holding)
    sequences = make_sequences(6)
    with_behavior(learner, sequences)
    told = {name for one in (learner, held, learner) for name in one.step(sequences)}
    emitted = {name for name in told if name.startswith("learner/")}
    assert emitted == set(re.findall(r"`(learner/[a-z0-9_]+)`", PAGE))


@pytest.mark.parametrize("model", [ObjectiveConfig, AdvantageConfig])
def test_every_key_is_on_the_page(model: type[ObjectiveConfig]) -> None:
    missing = [name for name in model.model_fields if f"`{name}`" not in PAGE and f"`{name}:" not in PAGE]
    assert missing == []


def test_every_metric_and_alarm_is_on_the_page_and_nothing_else() -> None:
    config = CONFIGS["sequence_kl"].model_copy(
        update={"geometric_gate": 2.0, "correction": "token_mask", "dual_clip": 2.0, "m2_bound": 0.04}
    )
    total = sum((run(config, random_example(seed)).stats for seed in range(10)), LossStats.zero())
    emitted = {name.split("/staleness_")[0] for name in loss_metrics(total, config)}
    named = set(re.findall(r"`((?:gspo|staleness)/[a-z0-9_]+)`", PAGE))
    # What follows from a whole batch, or from earlier ones, is told by the learner.
    assert emitted | {"gspo/k3_gate", "gspo/clip_low", "gspo/clip_high"} == named
    assert all(f"`{kind}`" in PAGE for kind in AlarmKind)


def test_the_page_says_how_long_an_alarm_must_last_and_what_holds_it_back() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.+ \| \d+) \|", PAGE, flags=re.MULTILINE))
    assert set(rows) == {str(kind) for kind in AlarmKind}
    for kind in AlarmKind:
        assert int(rows[kind].rpartition(" ")[2]) == alarms.PATIENCE.get(kind, 1), kind
    assert f"at least {alarms.MIN_SEQUENCES_OF_A_SIGN} sequences of each sign" in rows["one_sided_clip"]
    assert f"at least {alarms.MIN_TOKENS} tokens" in rows["weight_drift"]
    assert alarms.MIN_WEIGHT_DRIFT == 1e-4
    assert f"(of {alarms.DEFAULT_K3_GATE:g} where that is off)" in rows["mismatch_floor"]
    assert f"every {alarms.STEPS_UNTIL_REPEATED} further steps" in PAGE


def recipes() -> dict[str, ObjectiveConfig]:
    """How the page reproduces other projects, as it is written there."""
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "pipelinerl =" in one)
    names: dict[str, Any] = {"ObjectiveConfig": ObjectiveConfig}
    exec(compile(block, "docs/objective.md", "exec"), names)
    return {name: names[name] for name in ("areal", "pipelinerl")}


@pytest.mark.parametrize(
    ("recipe", "peer"), [("areal", "areal_ppo_actor_loss_sequence_2d"), ("pipelinerl", "pipelinerl_gspo")]
)
def test_the_recipes_reproduce_the_other_projects(recipe: str, peer: str) -> None:
    """On every case of their own numbers, those of episodes that several versions sampled among them."""
    compared = []
    for name, case in CASES.items():
        expected = expected_of(case, peer)
        if not is_finite(expected):
            continue
        clip = {"clip_low": case["clip_low"], "clip_high": case["clip_high"]}
        config = recipes()[recipe].model_copy(update=clip)
        if config.anchor == "behavior":  # what the others compare with is then the recorded sampler
            case = {**case, "inputs": {**case["inputs"], "behave": case["inputs"]["old"]}}
        loss, grad, _ = compute(config, case, torch.float64, "rows")
        assert_equals(loss, grad, expected, torch.float64)
        compared.append(name)
    assert sum("stitched" in name for name in compared) == sum("stitched" in name for name in CASES) > 0
    assert len(compared) > 15


def test_the_page_shows_the_defaults() -> None:
    config = ObjectiveConfig()
    rows = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+?) \|", PAGE, flags=re.MULTILINE))
    assert rows["`clip_low`, `clip_high`"] == "3e-4, 4e-4"
    assert (config.clip_low, config.clip_high) == (3e-4, 4e-4)
    for key in (
        "minibatches",
        "ratio",
        "gradient",
        "aggregate",
        "anchor",
        "advantage_reduction",
        "loss",
        "off_policy_gate",
    ):
        shown = next(value for keys, value in rows.items() if keys.startswith(f"`{key}`"))
        assert shown.split(",")[0].strip("`") in (str(getattr(config, key)), "see below"), key


def test_what_the_page_says_of_the_plot_is_in_its_record() -> None:
    """At a divergence of 0.001 and 8192 tokens: nine in ten negatives, almost no positive, 0.45 of all."""
    record = json.loads((ROOT / "benchmarks/results/drift_law.json").read_text())
    rows = [row for row in record["rows"] if row["length"] == 8192 and 9e-4 < row["kl"] < 1.1e-3]
    share = {row["config"]: (row["clipped_negative"], row["clipped_positive"]) for row in rows}
    negative, positive = share["behavior"]
    assert negative == pytest.approx(0.9, abs=0.03)
    assert positive < 0.03
    assert (negative + positive) / 2 == pytest.approx(0.45, abs=0.02)
    negative, positive = share["compensated"]
    assert abs(negative - positive) < 0.1 < min(negative, positive)
    assert share["proximal"] == (0, 0)


def test_the_command_makes_record_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python -m benchmarks.drift_law" in PAGE
    monkeypatch.setattr("sys.argv", ["drift_law", "--num-tokens", "16384", "--out", str(tmp_path)])
    monkeypatch.setattr(drift_law, "DIVERGENCES", (1e-3,))
    drift_law.main()
    assert json.loads((tmp_path / "drift_law.json").read_text())["num_tokens"] == 16384
    assert (tmp_path / "drift_law.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_is_there() -> None:
    (path,) = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert (ROOT / "docs" / path).resolve().read_bytes().startswith(b"\x89PNG")
