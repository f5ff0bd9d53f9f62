"""What the engine reports is what a plain forward computes: any batch, temperature, and reuse of the cache."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from services.engine.sampling import sample, uniforms
from services.engines.protocol import Generation
from services.engines.sglang import EngineClient
from tests.services.engines.engine_kit import VOCAB_SIZE, Models, random_prompt, until_load

TOLERANCE = 1e-4
TEMPERATURES = (0.5, 1.0, 2.0)
# One token in some hundreds is as likely at another temperature, by chance; that all of these are does not happen.
TELLING_LENGTH = 4


@pytest.mark.parametrize("num_requests", [1, 5, 64, 100])
async def test_logprobs_equal_a_plain_forward(engine: EngineClient, models: Models, num_requests: int) -> None:
    generator = random.Random(num_requests)
    requests = [
        (
            random_prompt(generator, generator.choice([1, 2, 30, 200])),
            generator.randint(1, 40) if i else 40,
            TEMPERATURES[i % 3],
        )
        for i in range(num_requests)
    ]
    generations = await asyncio.gather(
        *(
            engine.generate(prompt, max_new_tokens=length, temperature=temperature, stop_token_ids=[])
            for prompt, length, temperature in requests
        )
    )
    for (prompt, length, temperature), generation in zip(requests, generations, strict=True):
        assert generation.finish_reason == "length"
        assert len(generation.output_ids) == length
        assert models.deviation(0, prompt, generation, temperature) < TOLERANCE
        if length >= TELLING_LENGTH:
            other = TEMPERATURES[(TEMPERATURES.index(temperature) + 1) % 3]
            assert models.deviation(0, prompt, generation, other) > 10 * TOLERANCE


async def test_later_turns_reuse_the_tokens_of_earlier_ones(engine: EngineClient, models: Models) -> None:
    generator = random.Random(1)

    async def episode(first: list[int]) -> list[tuple[list[int], Generation]]:
        turns, prompt = [], first
        for _ in range(4):
            answer = await engine.generate(prompt, max_new_tokens=20, temperature=1.0, stop_token_ids=[7])
            turns.append((prompt, answer))
            prompt = [*prompt, *answer.output_ids, *random_prompt(generator, 11)]
        return turns

    for turns in await asyncio.gather(*(episode(random_prompt(generator, 40)) for _ in range(12))):
        for number, (prompt, answer) in enumerate(turns):
            assert models.deviation(0, prompt, answer, 1.0) < TOLERANCE
            if number:
                # the last sampled token was never an input, so it has no keys and values yet
                assert answer.cached_tokens == len(prompt) - 11 - 1


async def test_members_of_a_group_share_their_prompt(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(2), 150)
    await engine.pause("retract")  # so that all of them wait when the next step begins
    calls = [
        asyncio.create_task(engine.generate(prompt, max_new_tokens=10, temperature=1.0, stop_token_ids=[]))
        for _ in range(8)
    ]
    await until_load(engine, "num_waiting_reqs", 8)
    await engine.resume()
    members = await asyncio.gather(*calls)
    assert sorted(member.cached_tokens for member in members) == [0] + [len(prompt) - 1] * 7
    assert len({tuple(member.output_ids) for member in members}) > 1
    assert all(models.deviation(0, prompt, member, 1.0) < TOLERANCE for member in members)


async def test_a_prefix_is_found_where_its_request_has_moved(engine: EngineClient, models: Models) -> None:
    generator = random.Random(8)
    first, shared, other = (random_prompt(generator, 40) for _ in range(3))

    async def ask(prompt: list[int], length: int) -> Generation:
        return await engine.generate(prompt, max_new_tokens=length, temperature=1.0, stop_token_ids=[])

    async def waiting(prompt: list[int], length: int, number: int) -> asyncio.Task[Generation]:
        """In their order: they wait while the engine pauses."""
        task = asyncio.create_task(ask(prompt, length))
        await until_load(engine, "num_waiting_reqs", number)
        return task

    await engine.pause("retract")
    leaving, moving = await waiting(first, 30, 1), await waiting(shared, 450, 2)
    await engine.resume()
    await leaving  # whoever runs behind it takes its row
    beside = await ask(other, 20)  # and this one the row behind that
    copied = await ask(shared, 20)
    assert copied.cached_tokens == 39
    for prompt, generation in ((shared, copied), (shared, await moving), (other, beside)):
        assert models.deviation(0, prompt, generation, 1.0) < TOLERANCE


async def test_cache_spaces_do_not_mix(engine: EngineClient) -> None:
    prompt = random_prompt(random.Random(3), 60)
    cached = [
        (
            await engine.generate(prompt, max_new_tokens=2, temperature=1.0, stop_token_ids=[], extra_key=space)
        ).cached_tokens
        for space in ("a", "a", "b", None, "b")
    ]
    assert cached == [0, 59, 0, 0, 59]


async def test_greedy_takes_the_best_token_at_temperature_one(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(4), 20)
    answer = await engine.generate(prompt, max_new_tokens=6, temperature=0.0, stop_token_ids=[])
    assert models.deviation(0, prompt, answer, 1.0) < TOLERANCE
    logits = models.reference(0)(torch.tensor([[*prompt, *answer.output_ids]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer.output_ids


async def test_a_seed_decides_what_is_sampled_whatever_runs_beside(engine: EngineClient) -> None:
    generator = random.Random(5)
    prompt = random_prompt(generator, 30)

    async def ask(ids: list[int], seed: int | None) -> list[int]:
        answer = await engine.generate(ids, max_new_tokens=25, temperature=1.0, stop_token_ids=[], sampling_seed=seed)
        return answer.output_ids

    alone = await ask(prompt, 11)
    crowd = [ask(random_prompt(generator, 50), None) for _ in range(20)]
    (beside, other_seed), *_ = await asyncio.gather(asyncio.gather(ask(prompt, 11), ask(prompt, 12)), *crowd)
    assert beside == alone
    assert other_seed != alone


async def test_pieces_that_are_asked_for_with_one_seed_are_the_answer_at_once(engine: EngineClient) -> None:
    prompt = random_prompt(random.Random(7), 30)

    async def ask(ids: list[int], num: int) -> list[int]:
        answer = await engine.generate(ids, max_new_tokens=num, temperature=1.0, stop_token_ids=[], sampling_seed=11)
        return answer.output_ids

    whole, found = await ask(prompt, 25), list[int]()
    for num in (1, 10, 3, 11):
        found += await ask([*prompt, *found], num)
    assert found == whole


async def test_a_stop_token_ends_the_request_and_stays_in_the_output(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(6), 20)
    free = await engine.generate(prompt, max_new_tokens=30, temperature=1.0, stop_token_ids=[], sampling_seed=3)
    stop = free.output_ids[12]
    answer = await engine.generate(prompt, max_new_tokens=30, temperature=1.0, stop_token_ids=[stop], sampling_seed=3)
    assert answer.finish_reason == "stop"
    assert answer.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    assert models.deviation(0, prompt, answer, 1.0) < TOLERANCE


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    num, temperature = 200_000, 0.7
    seeds = np.full(num, 123, dtype=np.uint64)
    numbers = torch.from_numpy(uniforms(seeds, np.arange(num, dtype=np.uint64)))
    ids, logprobs = sample(logits.expand(num, -1), torch.full((num,), temperature), numbers)
    expected = torch.softmax(logits / temperature, -1)
    frequencies = torch.bincount(ids, minlength=5) / num
    assert torch.allclose(frequencies, expected, atol=5 * (0.25 / num) ** 0.5)
    assert torch.allclose(logprobs, expected.log()[ids])


def test_uniforms_are_independent_of_their_neighbours() -> None:
    seeds = np.array([1, 2, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, 2**40], dtype=np.uint64)
    together = uniforms(seeds, positions)
    assert [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)] == together.tolist()
    many = uniforms(np.arange(10_000, dtype=np.uint64), np.zeros(10_000, dtype=np.uint64))
    assert abs(many.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.05
    assert many.min() >= 0
    assert many.max() < 1


def test_the_vocabulary_is_covered_up_to_its_last_id() -> None:
    logits = torch.full((4, VOCAB_SIZE), -100.0)
    logits[:, [0, VOCAB_SIZE - 1]] = 0.0
    ids, _ = sample(logits, torch.ones(4), torch.tensor([0.0, 0.49999, 0.50001, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [0, 0, VOCAB_SIZE - 1, VOCAB_SIZE - 1]
