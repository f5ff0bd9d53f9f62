"""Steps that are trained again give the weights that were published, bit for bit; a change says how far they differ."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from gspo_core.cli import main
from gspo_core.log import layout
from gspo_core.log.batches import LoggedBatch, encode_batch
from gspo_core.log.changes import ImpossibleChange, Without, with_reward
from gspo_core.objective_config import Loss, ObjectiveConfig
from gspo_core.replay.past import DamagedPast, NotKept, Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.spec import JobSpec
from tests.core.learner_support import MIXTURE, write_model
from tests.core.past_kit import GROUPS, SIZE, MadePast, make_past, remove_step, spec_of

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("Qwen3", {}, {}),
    "low rank": ("Qwen3", {}, {"learner": {"lora": {"rank": 4, "alpha": 8}}, "optimizer": {"lr": 1e-2}}),
    "adapters": (
        "Qwen3",
        {},
        {
            "learner": {"lora": {"rank": 4, "alpha": 8}},
            "optimizer": {"lr": 1e-2},
            "rollout": {"group_size": SIZE, "max_staleness": 1, "weight_transport": "adapter"},
        },
    ),
    "mixture": ("Qwen3Moe", MIXTURE, {"learner": {"routing_replay": True}}),
    "adapters of experts": (
        "Qwen3Moe",
        MIXTURE,
        {
            "learner": {"lora": {"rank": 2, "experts": True}},
            "optimizer": {"lr": 1e-2},
            "rollout": {"group_size": SIZE, "max_staleness": 1, "weight_transport": "adapter"},
        },
    ),
    "falling rate": ("Qwen3", {}, {"optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}}),
    "bounded by its name": ("Qwen3", {}, {"objective": {"name": "gspo", "minibatches": 2}}),
    "a clip that widens": ("Qwen3", {}, {"objective": {"minibatches": 2, "clip_spread": 5.0}}),
    "pull to the reference": ("Qwen3", {}, {"objective": {"minibatches": 2, "kl_coef": 0.1}}),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def past(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MadePast:
    return make_past(tmp_path_factory.mktemp("jobs") / "job_a", spec_of(model_dir))


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_found_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    family, shape, changes = KINDS[kind]
    made = make_past(tmp_path / "job_a", spec_of(write_model(tmp_path / "model", family, **shape), **changes))
    for step in range(1, 7):
        answer = replay(Past(made.folder), ReplayQuestion(step, step))
        [found] = answer.steps
        assert answer.is_same, (step, found)
        assert [one.version for one in found.versions] == [step]
        assert found.versions[0].num_same == found.versions[0].num_tensors > 10
        assert found.loss == made.losses[step]
        assert answer.num_replayed == (step - 1) % 2


def test_published_adapters_are_found_again_where_their_base_has_moved(tmp_path: Path) -> None:
    """Of their files only the base's place would differ; of another base they cannot be."""
    family, shape, changes = KINDS["adapters"]
    model = write_model(tmp_path / "model", family, **shape)
    made = make_past(tmp_path / "job_a", spec_of(model, **changes), steps=2)
    published = made.folder / "weights" / "v2"
    assert (published / "adapter_model.safetensors").is_file()
    assert not (published / "model.safetensors").exists()
    moved = model.rename(tmp_path / "moved")
    answer = replay(Past(made.folder, moved), ReplayQuestion(1, 2))
    assert answer.is_same
    tensors = load_file(published / "adapter_model.safetensors")
    tensors[min(tensors)][0, 0] += 1
    save_file(tensors, published / "adapter_model.safetensors")
    record = made.folder / "versions" / "00000002.json"
    assert replay(Past(made.folder, moved), ReplayQuestion(2, 2)).is_same, "the record has the digests"
    record.write_bytes(record.read_bytes().replace(digest_of(made.folder, 2).encode(), b"0" * 64))
    [found] = replay(Past(made.folder, moved), ReplayQuestion(2, 2)).steps
    [version] = found.versions
    assert version.differing_files == ("adapter_model.safetensors",)
    assert version.num_same == version.num_tensors - 1


def digest_of(folder: Path, version: int) -> str:
    [manifest] = [one for one in Past(folder).versions() if one.version == version]
    return next(file.sha256 for file in manifest.files if file.path == "adapter_model.safetensors")


def test_settings_that_changed_on_the_way_are_those_of_each_step(model_dir: Path, tmp_path: Path) -> None:
    settings = {3: {"optimizer.lr": 5e-3}, 5: {"optimizer.lr": 5e-3, "objective.k3_gate": 0.5}}
    made = make_past(tmp_path / "job_a", spec_of(model_dir), settings=settings)
    assert replay(Past(made.folder), ReplayQuestion(1, 6)).is_same


def test_other_bytes_than_were_published_are_told(past: MadePast, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    spec = json.loads((folder / layout.ACCEPTED).read_text())
    spec["spec"] = spec["spec"].replace('"lr":0.001', '"lr":0.002')
    (folder / layout.ACCEPTED).write_text(json.dumps(spec))
    [found] = replay(Past(folder), ReplayQuestion(4, 4)).steps
    assert not found.versions[0].is_same
    assert found.versions[0].differing_files == ("model.safetensors",)
    assert found.versions[0].num_same is not None
    assert found.versions[0].num_same < found.versions[0].num_tensors


def test_versions_that_are_gone_are_compared_by_their_digests(past: MadePast, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    shutil.rmtree(folder / layout.WEIGHTS)
    assert replay(Past(folder), ReplayQuestion(3, 4)).is_same


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(past: MadePast, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    shard = next((folder / layout.CHECKPOINTS).glob("*step000004/learner/rank*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    said: list[str] = []
    answer = replay(Past(folder), ReplayQuestion(6, 6), said.append)
    assert answer.is_same
    assert answer.start == "the checkpoint of step 2"
    assert "an older checkpoint is tried" in said[0]


def test_what_is_not_kept_is_refused_by_name(past: MadePast, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    for step in (1, 3):
        remove_step(folder, layout.BATCHES, step)
    with pytest.raises(NotKept, match="step 3 is not kept; kept are 2, 4-6"):
        replay(Past(folder), ReplayQuestion(3, 3))
    with pytest.raises(NotKept, match="leads to step 3"):
        replay(Past(folder), ReplayQuestion(4, 4))
    with pytest.raises(NotKept, match="step 9 is not kept"):
        replay(Past(folder), ReplayQuestion(9, 9))
    assert replay(Past(folder), ReplayQuestion(6, 6)).is_same


def test_a_damaged_log_ends_the_way_with_its_name(past: MadePast, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "job_a"
    shutil.copytree(past.folder, folder)
    path = folder / layout.BATCHES / "ep000001-step000005"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedPast, match=r"batches/ep000001-step000005.*sha256"):
        replay(Past(folder), ReplayQuestion(6, 6))


def test_another_setting_says_how_far_it_would_have_led(past: MadePast) -> None:
    near = replay(Past(past.folder), ReplayQuestion(5, 6, settings={"optimizer.lr": 1.1e-3}))
    far = replay(Past(past.folder), ReplayQuestion(5, 6, settings={"optimizer.lr": 2e-3}))
    same = replay(Past(past.folder), ReplayQuestion(5, 6, settings={"optimizer.lr": 1e-3}))
    assert near.is_same
    assert near.otherwise is not None
    assert far.otherwise is not None
    assert same.otherwise is not None
    assert near.otherwise.share == pytest.approx(0.1, rel=0.2)
    assert far.otherwise.share == pytest.approx(1.0, rel=0.2)
    assert same.otherwise.distance == 0
    assert same.otherwise.cosine == pytest.approx(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective.name": "grpo"},
        {"objective.loss": "cispo", "objective.ratio": "token"},
        {"objective.clip": [0.0003, 0.0004]},
        {"objective.correction": "none"},
        {"objective.kl_coef": 0.5},
        {"objective.advantage.scale": "none"},
        {"optimizer.betas": [0.5, 0.9]},
        {"seed": 7},
    ],
    ids=str,
)
def test_any_key_that_training_reads_can_be_set(past: MadePast, settings: dict[str, Any]) -> None:
    answer = replay(Past(past.folder), ReplayQuestion(4, 4, settings=settings))
    assert answer.is_same
    assert answer.otherwise is not None


def test_another_loss_brings_its_own_defaults(past: MadePast) -> None:
    """The stored specification spells the old loss's clip out."""
    from gspo_core.log.changes import changed_spec

    changed = changed_spec(past.spec, {"objective.name": "grpo"})
    assert changed.objective == ObjectiveConfig.model_validate({"name": "grpo", "minibatches": 2})


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"objective.geometric_gate": [0.999, 1.002]}, (0.999, 1.002)),
        ({"objective.geometric_gate": 1.5}, (None, 1.5)),
        ({"objective.geometric_gate": None}, (None, None)),
        ({"objective.geometric_gate_low": 0.95}, (0.95, 1.02)),
        ({"objective.geometric_gate_low": 0.95, "objective.geometric_gate": 1.5}, (0.95, 1.5)),
    ],
    ids=str,
)
def test_another_gate_brings_its_own_ends(settings: dict[str, Any], ends: tuple[float | None, float | None]) -> None:
    from gspo_core.log.changes import changed_spec, without_live

    gated = {"model": "m", "environments": [{"ref": "a:B"}], "objective": {"geometric_gate": [0.9, 1.02]}}
    spec = JobSpec.model_validate(gated)
    changed = changed_spec(spec, settings).objective
    assert (changed.geometric_gate_low, changed.geometric_gate) == ends
    if "objective.geometric_gate" in settings:
        live: Any = {"values": {"objective.geometric_gate": 1.3, "objective.geometric_gate_low": 0.8}, "version": 1}
        batch = LoggedBatch(1, 1, (), {"settings": live})
        assert without_live(batch, settings).extra["settings"]["values"] == {}


def test_a_setting_that_stands_for_another_one_does_not_undo_it() -> None:
    """Of two keys that contradict each other the first was dropped in silence."""
    from gspo_core.log.changes import changed_spec

    spec = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})
    named = changed_spec(spec, {"objective.name": "grpo", "objective.ratio": "token"}).objective
    assert (named.name, named.ratio) == ("grpo", "token")
    with pytest.raises(ImpossibleChange, match=r"clip_low: 0\.2 contradicts clip"):
        changed_spec(spec, {"objective.clip_low": 0.2, "objective.clip": 0.1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling.temperature": 2}, "sampling.temperature: no step that is trained again reads it"),
        ({"objective.clip_hi": 2}, "did you mean objective.clip_high"),
        ({"optimizer.lr": -1}, "optimizer.lr"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_reason(
    past: MadePast, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ImpossibleChange, match=said):
        replay(Past(past.folder), ReplayQuestion(4, 4, settings=settings))


@pytest.mark.parametrize("text", [str(3 * GROUPS), f"{3 * GROUPS}/1", "form", f"job_a/{3 * GROUPS}/1"])
def test_a_group_an_episode_or_a_part_of_the_reward_can_be_left_out(past: MadePast, text: str) -> None:
    answer = replay(Past(past.folder), ReplayQuestion(4, 4, without=Without.parse([text])))
    assert answer.is_same
    assert answer.otherwise is not None
    assert answer.otherwise.distance > 0


def test_what_is_not_there_cannot_be_left_out(past: MadePast) -> None:
    without = Without.parse(["77", "9/8", "style"])
    with pytest.raises(ImpossibleChange, match="group 77, episode 9/8, a reward part 'style': not in the batch"):
        replay(Past(past.folder), ReplayQuestion(4, 4, without=without))
    everything = Without.parse([str(number) for number in range(3 * GROUPS, 4 * GROUPS)])
    with pytest.raises(ImpossibleChange, match="nothing left to train"):
        replay(Past(past.folder), ReplayQuestion(4, 4, without=everything))


def test_the_group_that_pulled_most_comes_first(past: MadePast) -> None:
    answer = replay(Past(past.folder), ReplayQuestion(4, 4, influence=True))
    assert sorted(one.group for one in answer.influences) == list(range(3 * GROUPS, 4 * GROUPS))
    distances = [one.difference.distance for one in answer.influences]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0


def test_a_group_that_taught_nothing_has_no_influence(past: MadePast, tmp_path: Path) -> None:
    """Though without it the rest would be dealt to other updates, and end elsewhere."""
    folder, idle = Path(shutil.copytree(past.folder, tmp_path / "job_a")), 3 * GROUPS + 1
    batch = Past(folder).batch(4)
    groups = [
        replace(group, trajectories=tuple(with_reward(one, 0.5, {}) for one in group)) if group.group == idle else group
        for group in batch.groups
    ]
    (folder / layout.BATCHES / layout.step_name(batch.position)).write_bytes(
        b"".join(encode_batch(batch.position, groups, batch.extra))
    )
    found = replay(Past(folder), ReplayQuestion(4, 4, without=Without.parse([str(idle)]), influence=True))
    shares = {one.group: one.difference.distance for one in found.influences}
    assert shares.pop(idle) == 0
    assert all(shares.values())
    assert found.otherwise is not None
    assert found.otherwise.distance > 0


def losses() -> list[dict[str, Any]]:
    """Every loss with every unit of the ratio that it can have."""
    found: list[dict[str, Any]] = []
    for loss in get_args(Loss):
        for ratio in get_args(ObjectiveConfig.model_fields["ratio"].annotation):
            given = {"loss": loss, "ratio": ratio} | ({"dppo_delta": 0.1} if loss.startswith("dppo") else {})
            with contextlib.suppress(ValidationError):
                ObjectiveConfig.model_validate(given)
                found.append(given)
    return found


def test_every_loss_and_every_unit_of_a_ratio_is_among_them() -> None:
    assert {one["loss"] for one in losses()} == set(get_args(Loss))
    assert {one["ratio"] for one in losses()} == {"sequence", "turn", "token"}
    assert len(losses()) == 11


@pytest.mark.parametrize("aggregate", get_args(ObjectiveConfig.model_fields["aggregate"].annotation))
@pytest.mark.parametrize("loss", losses(), ids=str)
def test_the_shares_of_all_tokens_are_the_loss(past: MadePast, loss: dict[str, Any], aggregate: str) -> None:
    settings = {f"objective.{name}": value for name, value in {**loss, "aggregate": aggregate}.items()}
    settings["objective.kl_coef"] = 0.05
    answer = replay(Past(past.folder), ReplayQuestion(4, 4, settings=settings, single=(3 * GROUPS, 1)))
    single = answer.single
    assert single is not None
    assert single.step_loss == answer.losses_otherwise[0]
    assert abs(single.sum_of_shares - single.step_loss) < 1e-6
    assert single.loss == pytest.approx(sum(float(branch.loss.sum()) for branch in single.branches))
    assert single.step_loss != 0
    [branch] = single.branches
    assert len(branch.token) == single.episode.num_actions


def test_an_episode_is_shown_as_it_was_trained(past: MadePast) -> None:
    answer = replay(Past(past.folder), ReplayQuestion(4, 4, single=(3 * GROUPS, 1)))
    assert answer.is_same
    assert answer.single is not None
    episode, [branch] = answer.single.episode, answer.single.branches
    assert dict(episode.outcome.reward_parts).keys() == {"exact", "form"}
    [logged] = [one.behavior_logprobs[one.action_mask] for one in episode.branches]
    assert branch.behavior_logprob.tolist() == logged.tolist()
    assert abs(answer.single.sum_of_shares - answer.single.step_loss) < 1e-6
    assert set(branch.staleness.tolist()) == {0, 1}


def test_the_command_says_what_it_found(past: MadePast, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", f"{past.folder}@3-4"]) == 0
    assert "step 4: loss" in (shown := capsys.readouterr().out)
    assert shown.count("bit for bit") == 2
    arguments = ["--set", "optimizer.lr=2e-3", "--single", f"{3 * GROUPS}/0", "--json"]
    assert main(["replay", f"{past.folder}@4", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["is_same"]
    assert record["otherwise"]["share"] > 0.5
    assert len(record["single"]["branches"][0]["loss"]) > 5


@pytest.mark.parametrize("where", ["job", "job@", "job@0", "job@4-2", "nowhere@1"])
def test_the_command_refuses_what_it_cannot_find(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", where, "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("gspo: ")


def test_the_commands_of_the_page_work(past: MadePast, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "time-machine.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("gspo replay JOB")]
    assert len(lines) == 6
    ours = {"JOB@44": f"{past.folder}@4", "JOB@41-44": f"{past.folder}@3-4", "349": "9", "349/2": "9/2"}
    for line in lines:
        _, *words = shlex.split(line, comments=True)
        assert main([ours.get(word, word) for word in words]) == 0, line
        said = capsys.readouterr().out
        assert ("mismatch" if "--split-ratio" in words else "bit for bit") in said
