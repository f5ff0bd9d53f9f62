"""Engines of several ranks in one group, each at its places; a stand-in plays those that are not the first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engines.http_engine import open_http
from services.engines.sglang import EngineClient
from services.engines.sglang_versions import group_problem, num_ranks
from services.engines.weight_buckets import buckets_in
from services.engines.weight_group import WeightGroup
from tests.apparatus.warm_python import WarmPython
from tests.services.engines.engine_kit import EngineProcess, Models, make_model

TOLERANCE = 1e-4
PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(tuple(make_model(root / f"v{version}", seed=version) for version in range(2)))


@pytest.fixture
def engines(models: Models, tmp_path: Path, warm_python: WarmPython) -> Iterator[list[EngineProcess]]:
    """Of three ranks, and behind them in the group one of one rank."""
    ranked = ["tests.services.engines.ranked_engine", "3", str(tmp_path)]
    made = [
        EngineProcess(models.paths[0], python=warm_python.path),
        EngineProcess(models.paths[0], module=ranked),
    ][::-1]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.timeout(240)  # four processes that import torch
async def test_every_rank_of_every_engine_receives_every_byte(
    engines: list[EngineProcess], models: Models, tmp_path: Path
) -> None:
    buckets = buckets_in(models.paths[1], max_bytes=2**16)
    async with open_http() as http:
        clients = [EngineClient(engine.url, http) for engine in engines]
        assert [(await client.capabilities()).num_ranks for client in clients] == [3, 1]
        group = await WeightGroup.join(clients)
        assert await group.send(buckets, "job/1/1") is None
        for client in clients:
            answer = await client.generate(PROMPT, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
            assert [span.label for span in answer.spans] == ["job/1/1"]
            assert models.deviation(1, PROMPT, answer, 1.0) < TOLERANCE
        await group.close()
    sent = [hashlib.sha256(bucket.data.numpy().data).hexdigest() for bucket in buckets]
    assert len(sent) > 2
    for place in ("1", "2"):
        assert (tmp_path / place).read_text().split() == sent, place


@pytest.mark.parametrize(
    ("layout", "ranks", "problem"),
    [
        ({"tp_size": 1, "dp_size": 1, "pp_size": 1}, 1, ""),
        ({"tp_size": 4, "dp_size": 1, "pp_size": 1}, 4, ""),
        ({"tp_size": 8, "dp_size": 4, "pp_size": 1, "enable_dp_attention": True}, 8, ""),
        ({"tp_size": 4, "dp_size": 2, "pp_size": 1, "enable_dp_attention": False}, 4, "several copies (dp_size 2)"),
        ({"tp_size": 4, "dp_size": 1, "pp_size": 2}, 4, "several stages (pp_size 2)"),
        ({"tp_size": "4", "dp_size": 1, "pp_size": 1}, 1, "does not say how many ranks it has (tp_size)"),
    ],
)
def test_a_layout_is_counted_as_sglang_counts_it_or_refused(layout: dict[str, int], ranks: int, problem: str) -> None:
    assert num_ranks(layout) == ranks
    assert problem in group_problem(layout)
    assert bool(problem) == bool(group_problem(layout))
