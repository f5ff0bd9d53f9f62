"""Paths, status codes and bodies are those of a real SGLang, and no input ends the process."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import httpx
import pytest

from services.engines.protocol import EngineRejected, EngineUnavailable
from services.engines.sglang import EngineClient
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import (
    CONTEXT_LENGTH,
    UNHURRIED,
    VOCAB_SIZE,
    EngineProcess,
    Models,
    random_prompt,
    until_idle,
    until_load,
)

# As a real SGLang 0.5.23 answered (recorded on CPU, with log-probs).
RECORDED_ANSWER = {"text", "output_ids", "meta_info"}
RECORDED_META = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "input_token_logprobs"),
    *("output_token_logprobs", "output_token_logprobs_length", "reasoning_tokens", "completion_tokens"),
    *("cached_tokens", "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency"),
    "response_sent_to_client_ts",
}
RECORDED_META_OF_A_WAITING_ABORT = RECORDED_META - {
    *("prompt_tokens", "num_retractions", "reasoning_tokens", "cached_tokens", "cached_tokens_details", "dp_rank"),
}
RECORDED_MODEL_INFO = {
    *("model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params"),
    *("weight_version", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode"),
    *("has_image_understanding", "has_audio_understanding", "model_type", "architectures"),
}


def body(**changes: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True, **changes.pop("sampling", {})}
    return {"input_ids": [10, 20, 30, 40, 50, 60], "sampling_params": sampling, "return_logprob": True, **changes}


async def post(engine: EngineClient, http: httpx.AsyncClient, path: str, json: Any) -> httpx.Response:
    return await http.post(engine.url + path, json=json)


async def test_an_answer_has_the_recorded_shape(engine: EngineClient, http: httpx.AsyncClient) -> None:
    answer = (await post(engine, http, "/generate", body(rid="t1"))).json()
    meta = answer["meta_info"]
    assert answer.keys() == RECORDED_ANSWER
    assert meta.keys() == RECORDED_META
    assert meta["id"] == "t1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 4)

    without = (await post(engine, http, "/generate", body(return_logprob=False, return_prompt_token_ids=True))).json()
    assert without["prompt_token_ids"] == [10, 20, 30, 40, 50, 60]
    logprob_keys = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
    assert without["meta_info"].keys() == RECORDED_META - logprob_keys
    assert without["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]


async def test_a_stop_token_is_named_and_ignore_eos_disables_it(engine: EngineClient, http: httpx.AsyncClient) -> None:
    everything = list(range(VOCAB_SIZE))
    stopped = (
        await post(engine, http, "/generate", body(sampling={"stop_token_ids": everything, "ignore_eos": False}))
    ).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stopped["output_ids"][0]}
    assert len(stopped["output_ids"]) == 1
    ignored = (await post(engine, http, "/generate", body(sampling={"stop_token_ids": everything}))).json()
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (body(input_ids=None), "input_ids"),
        (body(input_ids=[]), "empty"),
        (body(input_ids=[[]]), "input_ids"),
        (body(input_ids=[[1, 2], [3]]), "input_ids"),
        (body(input_ids=[5, VOCAB_SIZE]), "vocabulary"),
        (body(input_ids=[-1]), "vocabulary"),
        (body(input_ids=[1.5]), "input_ids"),
        (body(input_ids="text"), "input_ids"),
        (body(input_ids=[5] * CONTEXT_LENGTH), "longer than the model's context length"),
        (body(sampling={"max_new_tokens": CONTEXT_LENGTH}), "exceeds the model's maximum context length"),
        (body(sampling={"max_new_tokens": 0}), "max_new_tokens"),
        (body(sampling={"max_new_tokens": "many"}), "max_new_tokens"),
        (body(sampling={"temperature": -1}), "temperature must be a non-negative finite number, got -1."),
        (body(sampling={"top_p": 0.5}), "top_p"),
        (body(sampling={"n": 2}), "n=2"),
        (body(sampling={"logit_bias": {"2": 1.0}}), "logit_bias"),
        (body(sampling={"bogus": 1}), "unknown field `bogus`, expected one of `max_new_tokens`, `stop`, "),
        (body(stream=True), "stream"),
        (body(logprob_start_len=0), "logprob_start_len"),
        ([1, 2], "object"),
    ],
)
async def test_bad_requests_are_a_400_and_the_server_lives(
    engine: EngineClient, http: httpx.AsyncClient, content: Any, message: str
) -> None:
    response = await post(engine, http, "/generate", content)
    assert response.status_code == 400
    assert message in response.text
    refused = response.json()
    assert "error" in refused or (refused["object"], refused["type"], refused["code"]) == ("error", "Bad Request", 400)
    assert (await post(engine, http, "/generate", body())).status_code == 200


async def test_malformed_bodies_and_unknown_paths(engine: EngineClient, http: httpx.AsyncClient) -> None:
    malformed = await http.post(f"{engine.url}/generate", content=b"{oops")
    assert (malformed.status_code, malformed.json()["object"]) == (400, "error")
    assert (await post(engine, http, "/generate", body(bogus=1))).status_code == 200
    wrong_method = await http.get(f"{engine.url}/generate")
    assert (wrong_method.status_code, wrong_method.json()) == (405, {"detail": "Method Not Allowed"})
    for path in ("/no_such", "/get_weight_version", "/get_load"):
        unknown = await http.get(engine.url + path)
        assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})


async def test_who_the_engine_is(engine: EngineClient, http: httpx.AsyncClient, models: Models) -> None:
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        response = await http.get(engine.url + path)
        assert (response.status_code, response.content) == (200, b"")
    info = await engine.model_info()
    assert info.keys() == RECORDED_MODEL_INFO
    assert (info["weight_version"], info["model_path"]) == ("default", str(models.paths[0]))
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    server = await engine.server_info()
    assert server["version"] == "0.5.23"
    assert (server["vocab_size"], server["context_length"]) == (VOCAB_SIZE, CONTEXT_LENGTH)


async def test_an_abort_ends_exactly_the_named_request(engine: EngineClient, models: Models) -> None:
    prompts = [random_prompt(random.Random(i), 20) for i in range(3)]
    calls = {
        rid: asyncio.create_task(
            engine.generate(prompt, max_new_tokens=300, temperature=1.0, stop_token_ids=[], rid=rid)
        )
        for rid, prompt in zip(("ep1", "ep10", "ep11"), prompts, strict=True)
    }
    await until_load(engine, "num_used_tokens", 60 + 3 * 5)
    await engine.abort("unknown")
    await engine.abort("ep")
    await engine.abort("ep1")
    aborted = await calls["ep1"]
    assert aborted.finish_reason == "abort"
    assert 5 <= len(aborted.output_ids) < 300
    assert models.deviation(0, prompts[0], aborted, 1.0) < 1e-4
    others = [await calls["ep10"], await calls["ep11"]]
    assert [(other.finish_reason, len(other.output_ids)) for other in others] == [("length", 300)] * 2
    for prompt, other in zip(prompts[1:], others, strict=True):
        assert models.deviation(0, prompt, other, 1.0) < 1e-4


async def test_a_pause_holds_new_requests(engine: EngineClient, http: httpx.AsyncClient) -> None:
    await engine.pause("retract")
    await engine.pause("in_place")  # pausing twice is fine
    assert not await engine.is_ready()
    held = asyncio.create_task(engine.generate([1, 2, 3], max_new_tokens=3, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_waiting_reqs", 1)
    assert (await http.get(f"{engine.url}/health")).status_code == 200
    assert not held.done()
    await engine.resume()
    assert len((await held).output_ids) == 3
    await engine.resume()  # so is continuing twice
    assert await engine.is_ready()


async def test_a_request_that_never_ran_can_be_aborted(engine: EngineClient, http: httpx.AsyncClient) -> None:
    await engine.pause("retract")
    waiting = asyncio.create_task(post(engine, http, "/generate", body(rid="waits")))
    await until_load(engine, "num_waiting_reqs", 1)
    await engine.abort("waits")
    answer = (await waiting).json()
    assert answer["output_ids"] == []
    assert answer["meta_info"].keys() == RECORDED_META_OF_A_WAITING_ABORT
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
    await engine.resume()


async def test_abort_all_and_the_default_of_a_relabel_end_everything(
    engine: EngineClient, http: httpx.AsyncClient
) -> None:
    for path, order in (("/abort_request", {"abort_all": True}), ("/update_weight_version", {"new_version": "zz"})):
        calls = [
            asyncio.create_task(engine.generate([i], max_new_tokens=400, temperature=1.0, stop_token_ids=[]))
            for i in range(4)
        ]
        await until_load(engine, "num_running_reqs", 4)
        assert (await post(engine, http, path, order)).status_code == 200
        assert {(await call).finish_reason for call in calls} == {"abort"}
    assert (await engine.model_info())["weight_version"] == "zz"


async def test_bad_control_calls(engine: EngineClient, http: httpx.AsyncClient) -> None:
    wrong_mode = await post(engine, http, "/pause_generation", {"mode": "sleep"})
    assert wrong_mode.status_code == 400
    assert "Input should be 'abort', 'retract' or 'in_place'" in wrong_mode.text
    assert (await post(engine, http, "/update_weights_from_disk", {})).json()["object"] == "error"
    assert (await post(engine, http, "/abort_request", {})).content == b""
    assert await engine.is_ready()


async def test_a_flush_forgets_prefixes_and_waits_only_when_told(engine: EngineClient) -> None:
    prompt = random_prompt(random.Random(0), 50)

    async def ask(length: int) -> int:
        answer = await engine.generate(prompt, max_new_tokens=length, temperature=1.0, stop_token_ids=[])
        return answer.cached_tokens

    assert (await ask(1), await ask(1)) == (0, 49)
    running = asyncio.create_task(ask(300))
    await until_load(engine, "num_running_reqs", 1)
    with pytest.raises(EngineRejected, match="Flush cache failed"):
        await engine.flush_cache()
    await engine.flush_cache(timeout_s=30)
    assert await running == 49
    assert await ask(1) == 0


async def test_a_live_id_is_refused_and_the_first_request_undisturbed(engine: EngineClient) -> None:
    first = asyncio.create_task(
        engine.generate([1], max_new_tokens=200, temperature=1.0, stop_token_ids=[], rid="twice")
    )
    await until_load(engine, "num_running_reqs", 1)
    with pytest.raises(EngineRejected, match="Duplicate request ID detected: twice"):
        await engine.generate([2], max_new_tokens=2, temperature=1.0, stop_token_ids=[], rid="twice")
    assert len((await first).output_ids) == 200
    again = await engine.generate([2], max_new_tokens=2, temperature=1.0, stop_token_ids=[], rid="twice")
    assert len(again.output_ids) == 2


async def test_a_client_that_leaves_frees_its_request(engine: EngineClient, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(engine.generate([1], max_new_tokens=500, temperature=1.0, stop_token_ids=[]))
    await until_load(engine, "num_running_reqs", 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until_idle(engine)
    # without the courtesy of an abort: the connection is just cut
    soon = httpx.Timeout(60, read=0.05)
    with pytest.raises(httpx.ReadTimeout):
        await http.post(f"{engine.url}/generate", json=body(sampling={"max_new_tokens": 500}), timeout=soon)
    await until_idle(engine)


async def test_a_term_signal_hands_back_what_was_sampled(
    models: Models, http: httpx.AsyncClient, warm_python: WarmPython
) -> None:
    server = EngineProcess(models.paths[0], "--weight-version", "job/0/0", python=warm_python.path, module=UNHURRIED)
    try:
        engine = EngineClient(server.url, http)
        call = asyncio.create_task(engine.generate([1], max_new_tokens=500, temperature=1.0, stop_token_ids=[]))
        await until_load(engine, "num_used_tokens", 20)
        server.process.send_signal(signal.SIGTERM)
        partial = await call
        assert partial.finish_reason == "abort"
        assert len(partial.output_ids) >= 19
        assert [span.label for span in partial.spans] == ["job/0/0"]
        assert server.process.wait(timeout=HANG_S) == 0
    finally:
        server.close()
    with pytest.raises(EngineUnavailable):
        await engine.model_info()
    assert not await engine.is_ready()
