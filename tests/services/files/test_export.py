"""A checkpoint leaves as a directory that transformers loads, with exactly its weights."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from services.files import export_here
from services.files.checkpoints import CheckpointStore
from services.files.export import CheckpointNotFound, ExportFailed, export_checkpoint
from services.files.export_process import main
from services.files.job_dir import JobDir
from services.files.job_records import AcceptedJob, JobRecords
from services.trainer.building import make_learner
from tests.core.learner_support import make_sequences, with_behavior, write_model

LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def check_adapter(model_dir: Path, export: Path) -> None:
    """`peft` puts the additions over the base model, and computes what the whole export computes."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    base, whole = load(model_dir).eval(), load(export).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain, merged = base(ids).logits, whole(ids).logits
        added = peft.PeftModel.from_pretrained(base, export / "adapter").eval()(ids).logits
    assert (added - merged).abs().max() < 1e-5 < (plain - merged).abs().max()
    said = json.loads((export / "adapter" / "adapter_config.json").read_text())
    assert set(said["target_modules"]) == LAYERS


def check_the_command(job: JobDir, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed where a trainer runs, it writes the same where the API looks, once."""
    place = job.export(Position(2, 7))
    for where in ("job_a@7", "job_a"):
        assert export_here.main([where]) == 0
        assert capsys.readouterr().out == f"{place}\n"
    assert (place / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    for where, told in (
        ("job_a@8", "no such checkpoint of job_a is kept; kept: 7"),
        ("job_a@", "job_a@: write JOB or JOB@STEP"),
        ("../job_a", "there is no job ../job_a in "),
    ):
        assert export_here.main([where]) == 1
        assert told in capsys.readouterr().err


# peft asks transformers by a name that transformers gives up
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_transformers_loads_are_the_weights_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With additions of low rank, whose sum is what counts; then the checkpoint is damaged, and refused."""
    monkeypatch.setenv("GSPO_DATA_DIR", str(tmp_path / "data"))
    job_dir, target = tmp_path / "data" / "jobs" / "job_a", tmp_path / "exports" / "one"
    model_dir = write_model(tmp_path / "model")
    (model_dir / "tokenizer.json").write_text("{}")
    spec = JobSpec.model_validate(
        {
            "model": str(model_dir),
            "environments": [{"ref": "a:B"}],
            "learner": {"lora": {"rank": 2}},
            "optimizer": {"lr": 1e-2},
            "resources": {"device": "cpu"},
        }
    )
    JobRecords(JobDir(job_dir)).accept(AcceptedJob(spec.model_dump_json(), "", "now"))
    learner, sequences = make_learner(spec), make_sequences(6)
    with_behavior(learner, sequences)
    learner.step(sequences)
    CheckpointStore(JobDir(job_dir)).write(Position(2, 7), Lineage(step=7), learner.save_state)
    learner.save_weights(tmp_path / "expected")

    assert export_checkpoint(JobDir(job_dir), 2, 7, target) == target
    exported, expected, start = (
        transformers.AutoModelForCausalLM.from_pretrained(one).state_dict()
        for one in (target, tmp_path / "expected", model_dir)
    )
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert any(not torch.equal(exported[name], start[name]) for name in start)
    check_adapter(model_dir, target)
    assert (target / "tokenizer.json").is_file()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ExportFailed, match="exists"):
        export_checkpoint(JobDir(job_dir), 2, 7, target)
    check_the_command(JobDir(job_dir), target, capsys)
    with pytest.raises(CheckpointNotFound, match="epoch 2, step 8"):
        export_checkpoint(JobDir(job_dir), 2, 8, tmp_path / "two")

    shard = CheckpointStore(JobDir(job_dir)).learner_dir(Position(2, 7)) / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(bytes(data))
    assert main([str(job_dir), "2", "7", str(tmp_path / "two")]) == 1
    assert "damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "expected", "exports", "model"]


def test_an_api_without_torch_says_where_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointStore(JobDir(tmp_path)).write(Position(0, 1), Lineage(step=1), lambda folder: folder.mkdir())
    monkeypatch.setattr("services.files.export.find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(ExportFailed, match="no torch is installed here: export it where a trainer runs"):
        export_checkpoint(JobDir(tmp_path), 0, 1, tmp_path / "export")


@pytest.mark.parametrize(
    ("where", "since", "chosen"),
    [("job_a", (3, 5), (2, 5)), ("job_a@3", (3, 5), (2, 3)), ("job_a@9", (3, 5), (1, 9)), ("job_a", (), (1, 2))],
)
def test_the_command_takes_what_the_job_has_not_left(
    where: str, since: tuple[int, ...], chosen: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went back from step 9 to 2, and has kept steps ``since``."""
    monkeypatch.setenv("GSPO_DATA_DIR", str(tmp_path))
    job = JobDir(tmp_path / "jobs" / "job_a")
    job.accepted.parent.mkdir(parents=True)
    job.accepted.touch()
    store = CheckpointStore(job)
    for at in ((1, 2), (1, 3), (1, 9), *((2, step) for step in since)):
        store.write(Position(*at), Lineage(step=at[1]), lambda folder: folder.mkdir())
    store.begin_epoch(2, Position(1, 2))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(export_here, "export_checkpoint", lambda job, epoch, step, target: asked.append((epoch, step)))
    assert export_here.main([where]) == 0
    assert asked == [chosen]
