"""Four ranks that share sequences, or hold copies of the model, learn what one process learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from gspo_core.learner.context import ContextRanks
from gspo_core.learner.fitting import settled
from gspo_core.learner.model_directory import UnsupportedModel
from gspo_core.learner.ranks import Ranks, UnsupportedRanks
from gspo_core.learner_config import LearnerConfig, LearnerOptions
from tests.core import learner_process
from tests.core.learner_process import ARRANGED
from tests.core.learner_support import (
    MIXTURE,
    largest_difference,
    load_weights,
    make_learner,
    make_sequences,
    with_behavior,
    write_model,
)
from tests.core.test_learner_ranks import TOLERANCE, check_same, run_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("warm_children")]
SHAPES = {
    "model": ("Qwen3", {"tie_word_embeddings": True}),
    "mixture": ("Qwen3Moe", MIXTURE),
    "window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> Path:
    root = tmp_path_factory.mktemp("arranged")
    for name, (family, changes) in SHAPES.items():
        write_model(root / name, family, **changes)
    run_ranks(root, "arranged", 4)
    return root


def alone(root: Path, case: str) -> Path:
    """What one rank learns of the same case."""
    if not (root / "alone" / case / "metrics.json").exists():
        learner_process.run_case(root, root / "alone" / case, *ARRANGED[case])
    return root / "alone" / case


@pytest.mark.parametrize(("arrangement", "case"), learner_process.SOON)
def test_an_arrangement_equals_one_rank(four_ranks: Path, arrangement: str, case: str) -> None:
    check_same(learner_process.model_of(four_ranks, case), alone(four_ranks, case), four_ranks / arrangement / case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_arrangement_equals_one_rank(four_ranks: Path) -> None:
    run_ranks(four_ranks, "rearranged", 4, timeout_s=1500)
    for arrangement, case in learner_process.LATER:
        check_same(learner_process.model_of(four_ranks, case), alone(four_ranks, case), four_ranks / arrangement / case)


def test_adding_the_gradients_of_a_shared_micro_batch_would_be_noticed(four_ranks: Path) -> None:
    with pytest.raises(AssertionError):
        check_same(four_ranks / "model", alone(four_ranks, "packed"), four_ranks / learner_process.DOUBLED / "packed")


def test_only_one_copy_of_the_model_writes_its_state(four_ranks: Path) -> None:
    def shards(arrangement: str, case: str) -> list[str]:
        return sorted(path.name for path in (four_ranks / arrangement / case / "state").glob("rank-*"))

    assert shards("two copies", "packed") == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert len(shards("sequences over four", "shared")) == 4


@pytest.mark.parametrize(("arrangement", "case"), [("two copies", "packed"), ("sequences over four", "shared")])
def test_one_rank_goes_on_from_an_arrangement(four_ranks: Path, tmp_path: Path, arrangement: str, case: str) -> None:
    """With exactly the weights that the ranks had, and moments that lead to the same next update."""
    objective, config, number = ARRANGED[case]
    options: dict[str, Any] = dict(config)
    learner = make_learner(four_ranks / "model", objective, **options)
    learner.load_state(four_ranks / arrangement / case / "state")
    learner.save_weights(tmp_path / "loaded")
    saved, later = (load_weights(four_ranks / arrangement / case / stage) for stage in ("weights", "supervised"))
    assert largest_difference(load_weights(tmp_path / "loaded"), saved) == 0
    sequences = make_sequences(number)
    with_behavior(learner, sequences)
    learner.supervised_step(sequences)
    learner.save_weights(tmp_path / "trained")
    assert largest_difference(load_weights(tmp_path / "trained"), later) < TOLERANCE * largest_difference(saved, later)


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    config = LearnerConfig(context_parallel=4)
    with pytest.raises(UnsupportedModel, match="4 ranks cannot share 6 heads"):
        settled(tmp_path / "model", config, torch.device("cpu"), Ranks(0, 4), has_reference=False)


def test_ranks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    for problem, options in {
        "context_parallel: 3 does not divide": {"context_parallel": 3},
        "replicas: 3 does not divide": {"replicas": 3},
        "leave one rank to each": {"replicas": 4},
    }.items():
        with pytest.raises(UnsupportedRanks, match=problem):
            Ranks(0, 4).arranged(LearnerOptions(**options))
    with pytest.raises(ValidationError, match="not padded"):
        LearnerOptions(context_parallel=2, layout="padded")
    write_model(tmp_path / "model")
    with pytest.raises(UnsupportedRanks, match="does not divide the number of ranks, 1"):
        make_learner(tmp_path / "model", context_parallel=2)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 2), (4, 2, 4), (6, 2, 3), (8, 1, 2), (4, 2, 1)])
def test_heads_travel_and_come_back(heads: int, key_heads: int, size: int) -> None:
    """All ranks of a group in one process: what each sends is handed over by hand."""
    num_tokens, width = 7, 3
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, number, num_tokens, width), generator=generator) for number in (heads, key_heads, key_heads)
    )
    by_hand = ByHand(size)
    whole = [by_hand.all_tokens(place, query, key, value, num_tokens) for place in range(size)]
    assert torch.equal(torch.cat([q for q, _, _ in whole], dim=1), query)
    repeats = heads // key_heads
    for place, (q, k, v) in enumerate(whole):
        own = heads // size
        seen = [head // repeats for head in range(place * own, (place + 1) * own)]
        each = own // k.shape[1]
        assert torch.equal(k.repeat_interleave(each, dim=1), key[:, seen])
        assert torch.equal(v.repeat_interleave(each, dim=1), value[:, seen])
        assert q.shape[2] == num_tokens
    outputs = [q.transpose(1, 2) for q, _, _ in whole]
    parts = [by_hand.own_tokens(place, outputs) for place in range(size)]
    assert torch.equal(torch.cat(parts, dim=1)[:, :num_tokens], query.transpose(1, 2))


class ByHand:
    """A group of ranks whose exchanges are computed here: every rank's side first, then what each receives."""

    def __init__(self, size: int) -> None:
        self.size = size

    def _context(self, place: int) -> ContextRanks:
        group: Any = None
        return ContextRanks(group, place, self.size)

    def _ran(self, sides: list[Callable[[ContextRanks], Any]], place: int) -> Any:
        sent: list[torch.Tensor] = []

        def send(_: ContextRanks, parts: torch.Tensor) -> torch.Tensor:
            sent.append(parts)
            return parts

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContextRanks, "_exchange", send)
            for number, side in enumerate(sides):
                side(self._context(number))
            patch.setattr(ContextRanks, "_exchange", lambda *_: torch.stack([parts[place] for parts in sent]))
            return sides[place](self._context(place))

    def all_tokens(self, place: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, number: int) -> Any:
        def side(context: ContextRanks) -> Any:
            size = context.part_size(number)
            padded = (F.pad(x, (0, 0, 0, size * self.size - number)) for x in (query, key, value))
            own = (x[:, :, context.place * size : (context.place + 1) * size] for x in padded)
            return context.all_tokens(*own, number)

        return self._ran([side] * self.size, place)

    def own_tokens(self, place: int, outputs: list[torch.Tensor]) -> Any:
        return self._ran([lambda context, o=one: context.own_tokens(o) for one in outputs], place)
