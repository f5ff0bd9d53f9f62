"""Two ranks under torchrun (FSDP2, gloo) learn what one process learns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gspo_core.learner import state
from gspo_core.learner.ranks import owners
from gspo_core.lora_adapter import BaseWeights, merged_weights
from tests.core import learner_process
from tests.core.learner_support import (
    MIXTURE,
    largest_difference,
    load_weights,
    make_learner,
    make_sequences,
    with_behavior,
    write_model,
)

# starting processes is slow on a busy machine
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm_children")]
# Of what the weights moved by; float32 sums in another order, and the clip's rounding near its bounds.
TOLERANCE = 2e-4
# Gradients of a micro-batch are rounded to 8 bits before they are added up, and several ranks cut a batch elsewhere.
HALF_TOLERANCE = 0.03
# Gradients that differ in last bits may round a moment to the next of 255 codes: a weight in a thousand at most, and so
# far at most. Which ones depends on the processor. The tolerance is that of metrics.
EIGHT_BIT_TOLERANCE = 0.01
OTHERWISE_ROUNDED = 1e-3
FARTHEST_ROUNDED = 0.03
# Of the largest weight: a step that was held moves some of them by less than a thousand times their last bit.
ROUNDING = 2.0**-22


def run_ranks(root: Path, what: str, number: int, *, timeout_s: float | None = None) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)),
            *(learner_process.__file__, what, str(root)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=timeout_s or 240 * number // 2,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> Path:
    """The results of all cases, run once: starting processes takes most of the time."""
    root = tmp_path_factory.mktemp("ranks")
    write_model(root / "model", tie_word_embeddings=True)
    write_model(root / "mixture", "Qwen3Moe", **MIXTURE)
    run_ranks(root, "ranks", 2)
    return root


def check_equals_one(two_ranks: Path, tmp_path: Path, case: str) -> None:
    objective, config, number = learner_process.RANK_CASES[case]
    learner_process.run_case(two_ranks, tmp_path / case, objective, learner_process.on_one_rank(config), number)
    model = learner_process.model_of(two_ranks, case)
    check_same(model, tmp_path / case, two_ranks / case, tolerance_of(case), is_rounded="eight bits" in case)


@pytest.mark.parametrize("case", learner_process.RANK_CASES_SOON)
def test_two_ranks_equal_one(two_ranks: Path, tmp_path: Path, case: str) -> None:
    check_equals_one(two_ranks, tmp_path, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_equal_one_in_all_cases_and_resume(two_ranks: Path, tmp_path: Path) -> None:
    run_ranks(two_ranks, "ranks_later", 2)
    for case in learner_process.RANK_CASES_LATER:
        check_equals_one(two_ranks, tmp_path, case)
        check_resumed(two_ranks, case)
    check_log_probs(two_ranks, tmp_path / "again", "mixture in bfloat16")


@pytest.mark.parametrize("case", ["gspo", "bfloat16"])
def test_a_sequence_has_the_same_log_probs_on_two_ranks(two_ranks: Path, tmp_path: Path, case: str) -> None:
    """To the bit also in half precision: what flows between layers, and what experts compute in, is alike."""
    check_log_probs(two_ranks, tmp_path, case)


def check_log_probs(two_ranks: Path, tmp_path: Path, case: str) -> None:
    learner_process.run_case(two_ranks, tmp_path / case, *learner_process.RANK_CASES[case])
    one, two = (np.load(root / case / "logprobs.npy") for root in (tmp_path, two_ranks))
    assert np.abs(one).max() > 1
    assert np.array_equal(one, two)


def tolerance_of(case: str) -> float:
    if "bfloat16" in case:
        return HALF_TOLERANCE
    return EIGHT_BIT_TOLERANCE if "eight bits" in case else TOLERANCE


def check_same(
    model: Path, first: Path, second: Path, tolerance: float = TOLERANCE, *, is_rounded: bool = False
) -> None:
    """Both learned the same from `model`; where moments are rounded, but for a few weights."""
    start = load_weights(model)
    for stage in ("weights", "supervised"):
        one, two = (load_weights(root / stage) for root in (first, second))
        moved = largest_difference(start, one)
        assert moved > 1e-4, "the case must train something"
        largest = max(float(tensor.abs().max()) for tensor in one.values())
        farthest = FARTHEST_ROUNDED if is_rounded else tolerance
        assert largest_difference(one, two) < farthest * moved + ROUNDING * largest
        if is_rounded:
            apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
            is_far = apart > TOLERANCE * moved + ROUNDING * largest
            assert is_far.float().mean() <= OTHERWISE_ROUNDED
    one_metrics, two_metrics = (json.loads((root / "metrics.json").read_text()) for root in (first, second))
    assert one_metrics.keys() == two_metrics.keys()
    for name, value in one_metrics.items():
        rel = (10 if "_max" in name or "_min" in name else 5) * tolerance  # an extreme is what one token says
        assert value == pytest.approx(two_metrics[name], rel=rel, abs=tolerance / 10), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [4, 8])
def test_more_ranks_equal_one_and_go_on_from_two(two_ranks: Path, tmp_path: Path, number: int) -> None:
    """With eight ranks some hold no expert of the mixture and no rows of the smallest tensors."""
    for model in ("model", "mixture"):
        shutil.copytree(two_ranks / model, tmp_path / "many" / model)
    shutil.copytree(two_ranks / "gspo", tmp_path / "many" / "two")
    run_ranks(tmp_path / "many", "many", number)
    for case in learner_process.cases_on(number):
        learner_process.run_case(two_ranks, tmp_path / case, *learner_process.RANK_CASES[case])
        model, is_rounded = learner_process.model_of(two_ranks, case), "eight bits" in case
        check_same(model, tmp_path / case, tmp_path / "many" / case, tolerance_of(case), is_rounded=is_rounded)
    start, two, other = (
        load_weights(root)
        for root in (two_ranks / "gspo" / "weights", two_ranks / "gspo" / "supervised", tmp_path / "many" / "from two")
    )
    assert largest_difference(two, other) < TOLERANCE * largest_difference(start, two)


def test_averaging_over_ranks_would_be_noticed(two_ranks: Path, tmp_path: Path) -> None:
    learner_process.run_case(two_ranks, tmp_path / "gspo", *learner_process.RANK_CASES["gspo"])
    with pytest.raises(AssertionError):
        check_same(two_ranks / "model", tmp_path / "gspo", two_ranks / learner_process.MISTAKE)


@pytest.mark.parametrize("case", learner_process.RANK_CASES_SOON)
def test_a_state_of_two_ranks_resumes_exactly(two_ranks: Path, case: str) -> None:
    check_resumed(two_ranks, case)


def check_resumed(two_ranks: Path, case: str) -> None:
    first, second = (
        {path.name: path.read_bytes() for path in (two_ranks / case / stage).glob("*.safetensors")}
        for stage in ("supervised", "resumed")
    )
    assert len(first) == 2
    assert first == second
    assert len(list((two_ranks / case / "state").glob("rank-*.safetensors"))) == 2


@pytest.mark.parametrize("case", ["gspo", "low rank", "mixture with replayed routes"])
def test_one_rank_goes_on_from_a_state_of_two(two_ranks: Path, tmp_path: Path, case: str) -> None:
    """With exactly the weights that two ranks had, and moments that lead to the same next update."""
    objective, config, number = learner_process.RANK_CASES[case]
    options: dict[str, Any] = dict(config)
    learner = make_learner(learner_process.model_of(two_ranks, case), objective, **options)
    learner.load_state(two_ranks / case / "state")
    learner.save_weights(tmp_path / "loaded")
    loaded, saved, later = (
        load_weights(root)
        for root in (tmp_path / "loaded", two_ranks / case / "weights", two_ranks / case / "supervised")
    )
    assert largest_difference(loaded, saved) == 0
    sequences = make_sequences(number)
    with_behavior(learner, sequences)
    learner.supervised_step(sequences)
    learner.save_weights(tmp_path / "trained")
    trained = load_weights(tmp_path / "trained")
    assert largest_difference(trained, later) < TOLERANCE * largest_difference(saved, later)


def test_both_ranks_remember_the_same_spread(two_ranks: Path, tmp_path: Path) -> None:
    """Bit for bit the same, and what one rank remembers."""
    case = "held near where it began, by bounds of the batch"
    learner_process.run_case(two_ranks, tmp_path / case, *learner_process.RANK_CASES[case])
    [one, first, second] = (
        load_file(root / case / "state" / state.shard_name(rank))[state.LOG_RATIO_STD].tolist()
        for root, rank in ((tmp_path, 0), (two_ranks, 0), (two_ranks, 1))
    )
    assert first == second
    assert first == pytest.approx(one, rel=1e-3)
    assert one[0] > 0


def test_an_adapter_of_two_ranks_is_what_they_publish_whole(two_ranks: Path) -> None:
    place, base = two_ranks / "low rank", learner_process.model_of(two_ranks, "low rank")
    merged, whole = merged_weights(BaseWeights(base), place / "adapter"), load_weights(place / "weights")
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    assert largest_difference(whole, load_weights(base)) > 0
    assert not list((place / "adapter").glob("model*"))


@pytest.mark.parametrize("case", ["gspo", "mixture with replayed routes", "low rank"])
def test_each_rank_writes_its_share_of_a_plain_model_directory(two_ranks: Path, case: str) -> None:
    """transformers reads it as one model; no rank has written most of it."""
    directory = two_ranks / case / "weights"
    files = sorted(directory.glob("*.safetensors"))
    assert [path.name for path in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
    assert max(sizes) < 0.7 * sum(sizes)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"].keys() == load_weights(learner_process.model_of(two_ranks, case)).keys()
    _, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    assert not list(directory.glob("share-*"))


def test_what_each_rank_keeps_is_about_the_same_and_layers_stay_together() -> None:
    sizes = {f"model.layers.{layer}.{name}": 10 for layer in range(7) for name in ("up", "down", "norm")}
    sizes |= {"embed": 55, "norm": 1}
    found = owners(sizes, 3)
    loads = [sum(sizes[name] for name in found if found[name] == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 30
    assert all(len({found[name] for name in sizes if f".{layer}." in name}) == 1 for layer in range(7))
    assert set(owners({"only": 1}, 4).values()) == {0}


def part_of(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """As FSDP2 spreads it."""
    chunks = torch.chunk(tensor, num_ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


@pytest.mark.parametrize(("num_saved", "num_loading"), [(1, 3), (3, 2), (2, 1), (4, 5)])
def test_tensors_are_spread_over_another_number_of_ranks(tmp_path: Path, num_saved: int, num_loading: int) -> None:
    """Among them one with fewer rows than ranks."""
    whole = {"parameter/a": torch.arange(21.0).reshape(7, 3), "optimizer/exp_avg/b": torch.arange(2.0)}
    for rank in range(num_saved):
        parts = {name: part_of(tensor, rank, num_saved) for name, tensor in whole.items()}
        alike = {"optimizer/step/a": torch.tensor(4.0), state.LOG_RATIO_STD: torch.tensor([0.5, 2.0])}
        state.write_shard(tmp_path / "state", rank, parts | alike)
    state.write_manifest(tmp_path / "state", num_saved, {})
    read = [state.read_state(tmp_path / "state", rank, num_loading)[1] for rank in range(num_loading)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([one[name] for one in read]), tensor)
        for rank, one in enumerate(read):
            assert torch.equal(one[name], part_of(tensor, rank, num_loading))
    assert all(one["optimizer/step/a"] == 4 and one[state.LOG_RATIO_STD].tolist() == [0.5, 2.0] for one in read)
