"""What running requests hold has a bound, and none of them is lost or sampled otherwise for it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from services.engine import kv_cache
from services.engine.model import Decoder
from services.engine.scheduler import GenerateRequest, Scheduler
from tests.services.engines.engine_kit import Models, max_difference, random_prompt


def request(rid: str, prompt: list[int], num_tokens: int) -> GenerateRequest:
    done = asyncio.get_running_loop().create_future()
    return GenerateRequest(rid, prompt, num_tokens, 1.0, frozenset(), 0, None, done)


def held_bytes(scheduler: Scheduler) -> int:
    return scheduler._cache.keys.nbytes + scheduler._cache.values.nbytes


@pytest.mark.parametrize("prefix_cache_bytes", [0, 10**8])
@pytest.mark.parametrize("num_tokens", [0, 4 * 64, 8 * 64, 8 * 128])
async def test_requests_wait_or_are_retracted_where_all_of_them_would_not_fit(
    models: Models, monkeypatch: pytest.MonkeyPatch, num_tokens: int, prefix_cache_bytes: int
) -> None:
    monkeypatch.setattr(kv_cache, "_FIRST_CAPACITY", 16)
    decoder = Decoder(models.paths[0], device=torch.device("cpu"), dtype=torch.float32, context_length=None)
    most = num_tokens * decoder.new_cache().token_bytes
    scheduler = Scheduler(decoder, max_concurrency=8, prefix_cache_bytes=prefix_cache_bytes, kv_cache_bytes=most)
    generator = random.Random(0)
    requests = [request(f"{n}", random_prompt(generator, generator.randrange(1, 90)), 40) for n in range(10)]
    for one in requests:
        scheduler.submit(one)
    while scheduler.has_work:
        scheduler.step()
        assert held_bytes(scheduler) <= most or scheduler._cache.keys.shape[1] == 1
    assert [len(one.output_ids) for one in requests] == [40] * 10
    for one in requests:
        expected = models.logprobs(0, one.prompt, one.output_ids, 1.0)
        assert max_difference(one.logprobs, expected) < 1e-4


async def test_a_retracted_request_goes_on_from_what_it_has(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are kept as a prefix: what it read is not computed again."""
    monkeypatch.setattr(kv_cache, "_FIRST_CAPACITY", 16)
    decoder = Decoder(models.paths[0], device=torch.device("cpu"), dtype=torch.float32, context_length=None)
    most = 4 * 32 * decoder.new_cache().token_bytes
    scheduler = Scheduler(decoder, max_concurrency=8, prefix_cache_bytes=10**8, kv_cache_bytes=most)
    requests = [request(f"{n}", random_prompt(random.Random(n), 12), 40) for n in range(4)]
    for one in requests:
        scheduler.submit(one)
    while scheduler.has_work:
        scheduler.step()
    assert [one.num_retractions for one in requests] == [0, 0, 1, 1]
    assert [len(one.output_ids) for one in requests] == [40] * 4
    assert scheduler.num_prefilled == 4 * 12 + 2


def test_what_one_long_request_took_is_given_back_when_many_run(models: Models) -> None:
    decoder = Decoder(models.paths[0], device=torch.device("cpu"), dtype=torch.float32, context_length=None)
    cache = decoder.new_cache()
    cache.reserve(1, 5_000)
    assert cache.keys.shape[-1] == 8_192
    cache.keys[:, 0, :, :, :5] = 1.0
    cache.reserve(2, 5)
    assert (cache.keys.shape[1], cache.keys.shape[-1]) == (2, 256)
    assert bool((cache.keys[:, 0, :, :, :5] == 1.0).all())
    assert cache.keys.nbytes + cache.values.nbytes == cache.size_bytes(2, 5)


@pytest.mark.parametrize(("limit", "expected"), [("4096\n", 1_024), ("max\n", None), (None, None)])
def test_a_container_has_a_quarter_of_what_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, expected: int | None
) -> None:
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    monkeypatch.setattr(kv_cache, "_CONTAINER_LIMITS", (path,))
    found = kv_cache.budget_bytes(torch.device("cpu"))
    assert found == expected if expected is not None else found > 2**20
