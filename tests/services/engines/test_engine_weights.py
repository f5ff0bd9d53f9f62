"""Weights that change while requests are in mid-sentence: nothing is lost, every token says who sampled it."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engines.protocol import EngineDirty, EngineRejected, Generation
from services.engines.sglang import EngineClient
from tests.patience import HANG_S
from tests.services.engines.engine_kit import (
    NUM_VERSIONS,
    Models,
    load_of,
    make_model,
    max_difference,
    random_prompt,
    until_idle,
    until_load,
)

TOLERANCE = 1e-4


def version_of(label: str) -> int:
    """Labels here read NAME/STEP/VERSION-OF-THE-WEIGHTS."""
    return 0 if label == "default" else int(label.rsplit("/", 1)[1])


def assert_spans_match_their_versions(
    models: Models, prompt: list[int], generation: Generation, temperature: float
) -> None:
    expected = {
        version: models.logprobs(version, prompt, generation.output_ids, temperature)
        for version in {version_of(span.label) for span in generation.spans}
    }
    for span in generation.spans:
        part = slice(span.start, span.end)
        assert max_difference(generation.logprobs[part], expected[version_of(span.label)][part]) < TOLERANCE


async def switch(engine: EngineClient, models: Models, label: str) -> None:
    await engine.pause("retract")
    await engine.load_weights(models.paths[version_of(label)], label)
    await engine.resume()


async def test_retracted_requests_go_on_under_the_new_weights(engine: EngineClient, models: Models) -> None:
    generator = random.Random(0)
    prompts = [random_prompt(generator, length) for length in (3, 40, 40, 90, 150, 1, 60, 60)]
    temperatures = (0.5, 1.0, 2.0, 1.0, 1.0, 2.0, 0.5, 1.0)
    calls = [
        asyncio.create_task(engine.generate(prompt, max_new_tokens=300, temperature=temperature, stop_token_ids=[]))
        for prompt, temperature in zip(prompts, temperatures, strict=True)
    ]
    await until_load(engine, "num_used_tokens", 444 + 8 * 20)
    await switch(engine, models, "job/1/1")
    generations = await asyncio.gather(*calls)
    for prompt, temperature, generation in zip(prompts, temperatures, generations, strict=True):
        assert [span.label for span in generation.spans] == ["default", "job/1/1"]
        assert len(generation.output_ids) == 300
        assert generation.num_retractions == 1
        assert_spans_match_their_versions(models, prompt, generation, temperature)
        # the versions do differ: no single one explains the whole answer
        assert all(models.deviation(version, prompt, generation, temperature) > 0.1 for version in (0, 1))


async def test_a_storm_of_updates_loses_nothing(engine: EngineClient, models: Models) -> None:
    generator = random.Random(1)
    requests = [(random_prompt(generator, generator.randint(1, 120)), generator.randint(150, 390)) for _ in range(32)]
    calls = [
        asyncio.create_task(engine.generate(prompt, max_new_tokens=length, temperature=1.0, stop_token_ids=[]))
        for prompt, length in requests
    ]
    await until_load(engine, "num_running_reqs", 32)
    for update in range(1, 11):
        await switch(engine, models, f"storm/{update}/{update % NUM_VERSIONS}")
        await asyncio.sleep(0.02)  # the updates come at any moment of a request, not one for each
    generations = await asyncio.gather(*calls)
    for (prompt, length), generation in zip(requests, generations, strict=True):
        assert len(generation.output_ids) == length
        assert_spans_match_their_versions(models, prompt, generation, 1.0)
    assert max(len(generation.spans) for generation in generations) >= 5
    info = await engine.model_info()
    assert info["weight_version"] == "storm/10/1"
    assert info["model_path"] == str(models.paths[1])


async def test_in_place_keeps_the_cache_and_new_requests_never_see_it(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(2), 60)
    call = asyncio.create_task(engine.generate(prompt, max_new_tokens=300, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_used_tokens", 90)
    await engine.pause("in_place")
    await engine.load_weights(models.paths[1], "job/1/1", flush_cache=False)
    await engine.resume()
    fresh = await engine.generate(prompt, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    stale = await call
    assert models.deviation(1, prompt, fresh, 1.0) < TOLERANCE
    assert fresh.cached_tokens == 0
    assert [span.label for span in stale.spans] == ["default", "job/1/1"]
    assert stale.num_retractions == 0
    first, second = stale.spans
    old = models.logprobs(0, prompt, stale.output_ids, 1.0)[: first.end]
    assert max_difference(stale.logprobs[: first.end], old) < TOLERANCE
    # new weights on old keys and values: close to no version, as documented
    new = models.logprobs(1, prompt, stale.output_ids, 1.0)[second.start :]
    assert max_difference(stale.logprobs[second.start :], new) > 10 * TOLERANCE
    again = await engine.generate([*prompt, *stale.output_ids], max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert models.deviation(1, [*prompt, *stale.output_ids], again, 1.0) < TOLERANCE


async def test_an_update_without_a_pause_waits_for_running_requests(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(3), 10)
    running = asyncio.create_task(engine.generate(prompt, max_new_tokens=200, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_used_tokens", 20)
    await engine.load_weights(models.paths[2], "job/1/2")
    later = await engine.generate(prompt, max_new_tokens=20, temperature=1.0, stop_token_ids=[])
    assert [span.label for span in (await running).spans] == ["default"]
    assert models.deviation(0, prompt, await running, 1.0) < TOLERANCE
    assert [span.label for span in later.spans] == ["job/1/2"]
    assert later.cached_tokens == 0
    assert models.deviation(2, prompt, later, 1.0) < TOLERANCE


def damage_shape(weights: Path) -> None:
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, weights)


def damage_number(weights: Path) -> None:
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, weights)


def damage_names(weights: Path) -> None:
    tensors = load_file(weights)
    tensors["model.layers.9.mlp.down_proj.weight"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, weights)


def damage_end(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [damage_shape, damage_number, damage_names, damage_end, Path.unlink])
async def test_damaged_weights_are_refused_and_the_old_ones_serve_on(
    engine: EngineClient, models: Models, tmp_path: Path, damage: object
) -> None:
    assert callable(damage)
    broken = tmp_path / "broken"
    shutil.copytree(models.paths[1], broken)
    damage(broken / "model.safetensors")
    prompt = random_prompt(random.Random(4), 30)
    running = asyncio.create_task(engine.generate(prompt, max_new_tokens=200, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_running_reqs", 1)
    await engine.pause("retract")
    with pytest.raises(EngineRejected, match="Failed to get weights iterator"):
        await engine.load_weights(broken, "job/1/1")
    await engine.resume()
    assert models.deviation(0, prompt, await running, 1.0) < TOLERANCE
    assert (await engine.model_info())["weight_version"] == "default"


async def test_weights_of_another_shape_are_refused(engine: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(EngineRejected, match="shape"):
        await engine.load_weights(make_model(tmp_path / "wider", seed=0, hidden_size=96), "job/1/1")
    assert await engine.is_ready()


async def test_a_flush_over_running_requests_leaves_the_engine_dirty_until_a_full_load(
    engine: EngineClient, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engines.sglang._REPAIR_TIMEOUT_S", 0.1)
    prompt = random_prompt(random.Random(5), 30)
    running = asyncio.create_task(engine.generate(prompt, max_new_tokens=300, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_used_tokens", 40)
    await engine.pause("in_place")
    with pytest.raises(EngineDirty, match="old cache or label"):
        await engine.load_weights(models.paths[1], "job/1/1")
    assert (await engine.model_info())["weight_version"] == "default"  # the label lies now, the spans do not
    await engine.resume()
    assert [span.label for span in (await running).spans] == ["default", "job/1/1"]
    await engine.load_weights(models.paths[2], "job/1/2")
    answer = await engine.generate(prompt, max_new_tokens=10, temperature=1.0, stop_token_ids=[])
    assert models.deviation(2, prompt, answer, 1.0) < TOLERANCE


async def test_a_load_that_replaced_weights_but_not_the_label_is_mended(engine: EngineClient, models: Models) -> None:
    """SGLang can answer 400 although the weights are new; once nothing runs, cache and label can follow."""
    prompt = random_prompt(random.Random(6), 30)
    running = asyncio.create_task(engine.generate(prompt, max_new_tokens=400, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_used_tokens", 40)
    await engine.pause("in_place")
    updated = asyncio.Event()

    async def watch(response: httpx.Response) -> None:
        if response.request.url.path == "/update_weights_from_disk":
            assert response.status_code == 400
            updated.set()

    async with httpx.AsyncClient(trust_env=False, event_hooks={"response": [watch]}) as watched:
        load = asyncio.create_task(EngineClient(engine.url, watched).load_weights(models.paths[1], "job/1/1"))
        async with asyncio.timeout(HANG_S):
            await updated.wait()
        await engine.resume()
        await load
    assert [span.label for span in (await running).spans] == ["default", "job/1/1"]
    assert (await engine.model_info())["weight_version"] == "job/1/1"
    answer = await engine.generate(prompt, max_new_tokens=10, temperature=1.0, stop_token_ids=[])
    assert answer.cached_tokens == 0
    assert models.deviation(1, prompt, answer, 1.0) < TOLERANCE


async def test_pausing_for_abort_returns_what_was_sampled(engine: EngineClient, models: Models) -> None:
    prompt = random_prompt(random.Random(7), 30)
    running = asyncio.create_task(engine.generate(prompt, max_new_tokens=400, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_used_tokens", 60)
    await engine.pause("abort")
    partial = await running
    assert partial.finish_reason == "abort"
    assert 30 <= len(partial.output_ids) < 400
    assert models.deviation(0, prompt, partial, 1.0) < TOLERANCE
    assert not await engine.is_ready()
    assert (await load_of(engine))["num_running_reqs"] == 0
    await engine.resume()
    # the client resumes from its own record: the prefix cache still holds it
    resumed = await engine.generate(
        [*prompt, *partial.output_ids], max_new_tokens=20, temperature=1.0, stop_token_ids=[]
    )
    assert resumed.cached_tokens == 30 + len(partial.output_ids) - 1
    assert models.deviation(0, [*prompt, *partial.output_ids], resumed, 1.0) < TOLERANCE
    await until_idle(engine)
