"""An exported checkpoint is served by a real SGLang, with the log-probs that transformers gives it."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from services.engines.sglang import EngineClient
from services.files.checkpoints import CheckpointStore
from services.files.export import export_checkpoint
from services.files.job_dir import JobDir
from services.files.job_records import AcceptedJob, JobRecords
from services.trainer.building import make_learner
from tests.apparatus.sglang_process import SGLangProcess
from tests.core.learner_support import make_sequences, with_behavior
from tests.patience import HANG_S
from tests.services.engines.engine_kit import Models, make_model

SGLANG_VENV = os.environ.get("GSPO_TEST_SGLANG_VENV", "")
PROMPT = [7, 11, 13, 17, 19]


@pytest.mark.skipif(not SGLANG_VENV, reason="needs a real SGLang: make sglang-cpu")
@pytest.mark.timeout(600)
async def test_sglang_serves_an_exported_checkpoint(tmp_path: Path) -> None:
    model_dir, target = make_model(tmp_path / "model", seed=0), tmp_path / "exported"
    spec = JobSpec.model_validate(
        {
            "model": str(model_dir),
            "environments": [{"ref": "a:B"}],
            "optimizer": {"lr": 1e-2},
            "resources": {"device": "cpu"},
        }
    )
    job_dir = tmp_path / "job_a"
    JobRecords(JobDir(job_dir)).accept(AcceptedJob(spec.model_dump_json(), "", "now"))
    learner, sequences = make_learner(spec), make_sequences(6)
    with_behavior(learner, sequences)
    learner.step(sequences)
    CheckpointStore(JobDir(job_dir)).write(Position(1, 1), Lineage(step=1), learner.save_state)
    export_checkpoint(JobDir(job_dir), 1, 1, target)

    server = SGLangProcess(Path(SGLANG_VENV), target, tmp_path / "sglang.log")
    try:
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as http:
            client = EngineClient(server.url, http)
            answer = await client.generate(PROMPT, max_new_tokens=40, temperature=1.0, stop_token_ids=[])
    finally:
        server.close()
    assert len(answer.output_ids) == 40
    models = Models((target, model_dir))
    assert models.deviation(0, PROMPT, answer, 1.0) < 1e-3
    assert models.deviation(1, PROMPT, answer, 1.0) > 1e-2, "the weights that the checkpoint began with"
