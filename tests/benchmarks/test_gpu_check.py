"""`make gpu-check` without a GPU: it says that nothing ran, and its checks find what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import one, sending, several
from benchmarks.gpu_check import rate as rates
from benchmarks.gpu_check.__main__ import CHECKS, NEEDS_A_GPU, main
from benchmarks.gpu_check.check import Check, Differs, Place, run_checks, status_of
from gspo_core.learner import attention as learner_attention
from gspo_core.learner import training
from gspo_core.plan import shape_of
from services.engines import weight_buckets

pytestmark = pytest.mark.timeout(300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would run")
def test_without_a_gpu_it_says_that_nothing_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 77
    said = capsys.readouterr().out
    assert "no GPU" in said
    assert f"none of {len(CHECKS)} checks ran" in said


@pytest.mark.parametrize("name", ["attention of packed rows", "head", "two steps", "resuming"])
def test_a_check_passes_on_a_cpu(name: str, tmp_path: Path) -> None:
    (check,) = [check for check in CHECKS if check.name == name]
    (result,) = run_checks([check], Place(1, tmp_path, "cpu"))
    assert result.became == "passed", result.said
    assert "apart" in result.said


def test_weights_are_sent_to_an_engine_on_a_cpu_as_well(tmp_path: Path) -> None:
    (check,) = [check for check in CHECKS if check.name == "weights sent to an engine"]
    (result,) = run_checks([check], Place(2, tmp_path, "cpu"))
    assert result.became == "passed", result.said
    assert "MiB in" in result.said


@pytest.mark.slow
def test_weights_that_come_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = weight_buckets.buckets_in

    def wrong(directory: Path, max_bytes: int) -> list[weight_buckets.Bucket]:
        buckets = right(directory, max_bytes)
        buckets[0].data.zero_()
        return buckets

    monkeypatch.setattr(sending, "buckets_in", wrong)
    with pytest.raises(Differs, match="log-probs"):
        sending.sending(Place(2, tmp_path, "cpu"))


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores the window, where values are half precision."""
    right = learner_attention._by_pieces

    def wrong(query: torch.Tensor, *others: Any) -> list[torch.Tensor]:
        *kept, window = others
        return right(query, *kept, None if query.dtype == torch.bfloat16 else window)

    monkeypatch.setattr(learner_attention, "_by_pieces", wrong)
    with pytest.raises(Differs, match="apart"):
        one.attention(Place(1, tmp_path, "cpu"))


def test_moments_that_are_lost_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = training.state.restore_tensors

    def wrong(model: Any, optimizer: Any, *others: Any) -> None:
        right(model, optimizer, *others)
        optimizer.state.clear()

    monkeypatch.setattr(training.state, "restore_tensors", wrong)
    with pytest.raises(Differs, match="next step"):
        one.resuming(Place(1, tmp_path, "cpu"))


@pytest.mark.usefixtures("warm_children")
def test_ranks_are_checked_against_one(tmp_path: Path) -> None:
    assert "float32" in several.arranged(2, context_parallel=2)(Place(2, tmp_path, "cpu"))
    weights = tmp_path / "2-context_parallel2" / "weights"
    assert weights.is_dir()
    with pytest.raises(Differs, match="does not divide"):
        several.arranged(2, context_parallel=3)(Place(2, tmp_path, "cpu"))


def test_what_did_not_run_is_named_and_what_failed_decides(tmp_path: Path) -> None:
    def fails(_: Place) -> str:
        raise Differs("wrong")

    def breaks(_: Place) -> str:
        raise RuntimeError("out of memory")

    checks = [Check("a", lambda _: "fine"), Check("b", fails), Check("c", breaks), Check("d", fails, 4)]
    results = list(run_checks(checks, Place(1, tmp_path)))
    assert [result.became for result in results] == ["passed", "failed", "failed", "did not run"]
    assert "it needs 4 GPUs, and there are 1" in str(results[3])
    assert "out of memory" in results[2].said
    assert (status_of(results), status_of(results[:1]), status_of(results[3:]), status_of([])) == (1, 0, 77, 77)
    assert {"memory beside the plan", "rate"} == set(NEEDS_A_GPU)


def test_the_rate_is_that_of_real_updates(tmp_path: Path) -> None:
    """On the CPU, with a tiny model: the batch is the one that both sides read."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    rates.prepare(tmp_path, shape | heads, groups=2, length=40)
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert len(batch["sequences"]) == 16
    found = rates.ours(tmp_path, "cpu")
    assert found["tokens_per_s"] > 0
    assert found["norm"] > 0
    assert shape_of(rates.QWEN3[rates.MODEL]).num_active() > 5e8
