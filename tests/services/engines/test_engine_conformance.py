"""One list of cases for every engine: what the client relies on is the same in all, what differs is written down.

Expected values are those of a real SGLang 0.5.23. Where the embedded engine differs on purpose (it refuses what would
end a real one, and it never loses a token) the case says so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.engines.probe import problem_of
from services.engines.weight_buckets import buckets_in
from services.engines.weight_group import WeightGroup
from tests.apparatus.sglang_process import SGLangProcess
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.conformance_subjects import NAMES, Subject, add_tokenizer, serve, start_sglang
from tests.services.engines.engine_kit import (
    CONTEXT_LENGTH,
    NUM_VERSIONS,
    UNHURRIED,
    VOCAB_SIZE,
    EngineProcess,
    Models,
    make_model,
    max_difference,
    random_prompt,
)

PROMPT = [10, 20, 30, 40, 50, 60]
# The order of float32 additions only.
TOLERANCE = 1e-4
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Versions with a tokenizer."""
    root = tmp_path_factory.mktemp("spoken")
    models = Models(tuple(make_model(root / f"v{version}", seed=version) for version in range(NUM_VERSIONS)))
    for path in models.paths:
        add_tokenizer(path)
    return models


@pytest.fixture(scope="module")
def embedded(spoken: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    engine = EngineProcess(spoken.paths[0], python=warm_python.path, module=UNHURRIED)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def sglang(spoken: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess | None]:
    if "sglang" not in NAMES:
        yield None
        return
    process = start_sglang(spoken, tmp_path_factory.mktemp("sglang") / "log")
    yield process
    process.close()


@pytest.fixture(params=NAMES)
async def subject(
    request: pytest.FixtureRequest, spoken: Models, embedded: EngineProcess, sglang: SGLangProcess | None
) -> AsyncIterator[Subject]:
    async with serve(request.param, spoken, embedded, sglang.url if sglang else None) as served:
        yield served


def spans_of(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


def prompt_of(number: int, length: int = 30) -> list[int]:
    return random_prompt(random.Random(number), length)


async def test_01_ids_logprobs_and_spans_line_up(subject: Subject) -> None:
    answer = (await subject.ask(PROMPT, 5, rid="0" * 32)).json()
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token_id, None] for token_id in ids]
    assert (len(ids), meta["completion_tokens"], meta["prompt_tokens"], meta["id"]) == (5, 5, 6, "0" * 32)
    assert spans_of(answer) == [("default", 0, 5)]
    bare = (await subject.ask(PROMPT, 5, return_logprob=False)).json()["meta_info"]
    assert "output_token_logprobs" not in bare
    assert bare["weight_versions"]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_02_logprobs_are_those_of_the_request_temperature(subject: Subject, temperature: float) -> None:
    answer = (await subject.ask(prompt_of(2), 40, sampling={"temperature": temperature})).json()
    assert subject.deviation(0, prompt_of(2), answer, temperature) < TOLERANCE
    assert subject.deviation(0, prompt_of(2), answer, 2 * temperature) > 100 * TOLERANCE


async def test_02b_greedy_reports_temperature_one(subject: Subject) -> None:
    answers = [(await subject.ask(PROMPT, 8, sampling={"temperature": 0})).json() for _ in range(2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert subject.deviation(0, PROMPT, answers[0], 1.0) < TOLERANCE


async def test_02c_top_k_leaves_logprobs_of_the_whole_vocabulary(subject: Subject) -> None:
    answer = await subject.ask(PROMPT, 8, sampling={"top_k": 4})
    if subject.name == "embedded":  # a trainer could not tell what it was drawn from
        assert (answer.status_code, "top_k" in answer.text) == (400, True)
    else:
        assert subject.deviation(0, PROMPT, answer.json(), 1.0) < TOLERANCE


async def test_02d_scoring_gives_the_logprobs_of_the_input_at_temperature_one(subject: Subject) -> None:
    ids = prompt_of(23, 60)
    logprobs, label = await subject.client.score(ids)
    assert label == "default"
    assert max_difference(logprobs, subject.logprobs(0, ids[:1], ids[1:], 1.0)) < TOLERANCE
    scored = (await subject.ask(ids, 0, logprob_start_len=0)).json()
    assert scored["output_ids"] == []
    assert scored["meta_info"]["input_token_logprobs"][0] == [None, ids[0], None]
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_03_stop_tokens_are_kept_and_ignore_eos_disables_them(subject: Subject) -> None:
    everything = list(range(VOCAB_SIZE))
    stopped = (await subject.ask(PROMPT, 5, sampling={"stop_token_ids": everything, "ignore_eos": False})).json()
    assert len(stopped["output_ids"]) == 1
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stopped["output_ids"][0]}
    ignored = (await subject.ask(PROMPT, 5, sampling={"stop_token_ids": everything})).json()
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_04_an_abort_returns_what_was_sampled(subject: Subject) -> None:
    running = subject.start(prompt_of(4), subject.long, rid="4" * 32)
    await subject.until_running(num_tokens=35)
    assert (await subject.post("/abort_request", rid="4" * 32)).status_code == 200
    response = await running
    answer = response.json()
    assert response.status_code == 200
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert answer["meta_info"]["finish_reason"] == reason
    assert 0 < len(answer["output_ids"]) < subject.long
    assert subject.deviation(0, prompt_of(4), answer) < TOLERANCE


async def test_05_an_abort_matches_live_ids_by_prefix(subject: Subject) -> None:
    calls = {rid: subject.start(prompt_of(5), subject.long, rid=rid) for rid in ("ep1", "ep10", "ep2")}
    await subject.until_running(3, num_tokens=3 * 30)
    await subject.post("/abort_request", rid="ep")  # no live id: nothing happens
    await subject.post("/abort_request", rid="ep1")
    reasons = {rid: (await call).json()["meta_info"]["finish_reason"]["type"] for rid, call in calls.items()}
    hit_by_prefix = "abort" if subject.has_sglangs_traps else "length"  # the embedded engine matches exactly
    assert reasons == {"ep1": "abort", "ep10": hit_by_prefix, "ep2": "length"}


async def test_06_an_abort_of_nobody_changes_nothing(subject: Subject) -> None:
    running = subject.start(PROMPT, 30)
    for body in ({"rid": "f" * 32}, {}):
        response = await subject.post("/abort_request", **body)
        assert (response.status_code, response.content) == (200, b"")
    assert (await running).json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_07_abort_all(subject: Subject) -> None:
    calls = [subject.start(prompt_of(7), subject.long) for _ in range(4)]
    await subject.until_running(4)
    await subject.post("/abort_request", abort_all=True)
    assert {(await call).json()["meta_info"]["finish_reason"]["type"] for call in calls} == {"abort"}
    assert (await subject.post("/abort_request", abort_all=True)).status_code == 200  # idle
    assert (await subject.ask(PROMPT, 3)).status_code == 200


async def test_08_an_abort_of_a_retracted_request_loses_its_tokens(subject: Subject) -> None:
    running = subject.start(prompt_of(8), subject.long, rid="8" * 32)
    await subject.until_running(num_tokens=35)
    await subject.client.pause("retract")
    await subject.client.abort("8" * 32)
    answer = (await running).json()
    await subject.client.resume()
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "Abort in waiting queue")
    if subject.has_sglangs_traps:
        # what was not handed to the front end yet, up to 50 tokens, is gone
        assert len(answer["output_ids"]) % 50 == 0
    else:
        assert len(answer["output_ids"]) > 0
    assert subject.deviation(0, prompt_of(8), answer) < TOLERANCE


async def test_08b_an_abort_while_paused_in_place_is_answered_with_all_tokens(subject: Subject) -> None:
    running = subject.start(prompt_of(81), subject.long, rid="8b" * 16)
    await subject.until_running(num_tokens=35)
    await subject.client.pause("in_place")
    await subject.client.abort("8b" * 16)
    await subject.client.resume()
    answer = (await running).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < subject.long
    assert subject.deviation(0, prompt_of(81), answer) < TOLERANCE


async def test_08c_an_abort_of_what_was_posted_while_paused(subject: Subject) -> None:
    await subject.client.pause("retract")
    held = subject.start(PROMPT, 4, rid="8c" * 16)
    await asyncio.sleep(0.3)  # nothing tells when a real engine has received it
    await subject.client.abort("8c" * 16)
    await subject.client.resume()
    kind = (await held).json()["meta_info"]["finish_reason"]["type"]
    assert kind == ("length" if subject.has_sglangs_traps else "abort")  # lost in a real engine


async def test_09_a_live_id_is_refused_and_free_afterwards(subject: Subject) -> None:
    running = subject.start(prompt_of(9), 100, rid="9" * 32)
    await subject.until_running()
    refused = await subject.ask(PROMPT, 2, rid="9" * 32)
    assert refused.status_code == 400
    assert "Duplicate request ID detected" in refused.json()["error"]["message"]
    assert len((await running).json()["output_ids"]) == 100
    assert (await subject.ask(PROMPT, 2, rid="9" * 32)).status_code == 200


async def test_10_unknown_keys(subject: Subject) -> None:
    refused = await subject.ask(PROMPT, 2, sampling={"bogus": 1})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("unknown field `bogus`, expected one of")
    assert (await subject.ask(PROMPT, 2, bogus=1)).status_code == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": None}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [5] * (CONTEXT_LENGTH + 10)}, "is longer than the model's context length"),
        ({"sampling_params": {"max_new_tokens": CONTEXT_LENGTH}}, "exceeds the model's maximum context length"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be a non-negative finite number, got -1"),
    ],
)
async def test_11_what_cannot_be_served_is_a_400(subject: Subject, changes: dict[str, Any], message: str) -> None:
    body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, **changes}
    response = await subject.post("/generate", **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert (await subject.ask(PROMPT, 2)).status_code == 200


async def test_12_pausing_for_abort_returns_partials(subject: Subject) -> None:
    running = subject.start(prompt_of(12), subject.long)
    await subject.until_running(num_tokens=35)
    assert (await subject.post("/pause_generation")).status_code == 200  # {} means abort
    answer = (await running).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < subject.long
    assert subject.deviation(0, prompt_of(12), answer) < TOLERANCE
    for path in ("/pause_generation", "/continue_generation", "/continue_generation"):
        assert (await subject.post(path)).status_code == 200
    bad = await subject.post("/pause_generation", mode="softly")
    assert bad.status_code == 400
    assert "Input should be 'abort', 'retract' or 'in_place'" in bad.text


async def test_13_a_retracted_request_goes_on_under_new_weights(subject: Subject, spoken: Models) -> None:
    prompt = prompt_of(13)
    running = subject.start(prompt, subject.long)
    await subject.until_running(num_tokens=40)
    await subject.client.pause("retract")
    assert (await subject.post("/flush_cache")).status_code == 200
    await subject.client.load_weights(spoken.paths[1], "job/1/1")
    await subject.client.resume()
    answer = (await running).json()
    (old, zero, cut), (new, also_cut, end) = spans_of(answer)
    assert (old, zero, new, end) == ("default", 0, "job/1/1", subject.long)
    assert 0 < cut == also_cut < end
    assert answer["meta_info"]["num_retractions"] == 1
    assert subject.deviation(0, prompt, answer, end=cut) < TOLERANCE
    assert subject.deviation(1, prompt, answer, start=cut) < TOLERANCE
    assert subject.deviation(0, prompt, answer, start=cut) > 100 * TOLERANCE


async def test_14_in_place_leaves_stale_prefixes_that_a_key_keeps_apart(subject: Subject, spoken: Models) -> None:
    prompt = prompt_of(14)
    running = subject.start(prompt, subject.long, extra_key="v0")
    await subject.until_running(num_tokens=40)
    await subject.client.pause("in_place")
    await subject.client.load_weights(spoken.paths[1], "job/1/1", flush_cache=False)
    await subject.client.resume()
    answer = (await running).json()
    (old, _, cut), (new, _, end) = spans_of(answer)
    assert (old, new, end) == ("default", "job/1/1", subject.long)
    assert answer["meta_info"]["num_retractions"] == 0
    assert subject.deviation(0, prompt, answer, end=cut) < TOLERANCE
    assert subject.deviation(1, prompt, answer, start=cut) > 100 * TOLERANCE  # new weights on stale keys and values
    apart = (await subject.ask(prompt, 20, extra_key="v1")).json()
    assert subject.deviation(1, prompt, apart) < TOLERANCE
    same_key = (await subject.ask(prompt, 20, extra_key="v0")).json()
    if subject.has_sglangs_traps:
        assert same_key["meta_info"]["cached_tokens"] > 0
        assert subject.deviation(1, prompt, same_key) > 100 * TOLERANCE
    else:  # it drops what belongs to no version
        assert subject.deviation(1, prompt, same_key) < TOLERANCE


async def test_15_a_flush_over_frozen_requests_replaces_weights_and_not_the_label(
    subject: Subject, spoken: Models
) -> None:
    running = subject.start(prompt_of(15), subject.long)
    await subject.until_running(num_tokens=35)
    await subject.client.pause("in_place")
    update = await subject.post(
        "/update_weights_from_disk", model_path=str(spoken.paths[1]), weight_version="job/1/1", flush_cache=True
    )
    assert update.status_code == 400
    assert "Weights were updated" in update.json()["message"]
    assert (await subject.client.model_info())["weight_version"] == "default"
    await subject.client.resume()
    assert [name for name, _, _ in spans_of((await running).json())] == ["default", "job/1/1"]


async def test_16_an_update_without_a_pause_lets_the_running_end(subject: Subject, spoken: Models) -> None:
    running = subject.start(prompt_of(16), 150)
    await subject.until_running()
    await subject.client.load_weights(spoken.paths[1], "job/1/1")
    assert spans_of((await running).json()) == [("default", 0, 150)]


async def test_17_an_update_that_aborts_everything(subject: Subject, spoken: Models) -> None:
    """Our client never asks for it: in a real engine the update and the aborts race."""
    calls = [subject.start(prompt_of(17), subject.long) for _ in range(3)]
    await subject.until_running(3, num_tokens=3 * 30)
    order = {"model_path": str(spoken.paths[1]), "weight_version": "job/1/1", "abort_all_requests": True}
    update = await subject.post("/update_weights_from_disk", **order)
    for call in calls:
        answer = (await call).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < subject.long
    if not subject.is_real:
        assert update.status_code == 200
    elif update.status_code != 200:  # the weights are new behind an old label
        assert (update.status_code, "Weights were updated" in update.json()["message"]) == (400, True)
        return
    answer = (await subject.ask(prompt_of(17), 10)).json()
    assert spans_of(answer) == [("job/1/1", 0, 10)]
    assert subject.deviation(1, prompt_of(17), answer) < TOLERANCE


async def test_18_weights_that_are_not_there(subject: Subject, spoken: Models) -> None:
    missing = await subject.post("/update_weights_from_disk", model_path=str(spoken.paths[0] / "none"))
    assert missing.status_code == 400
    assert missing.json()["success"] is False
    assert "Failed to get weights iterator" in missing.json()["message"]
    assert (await subject.post("/update_weights_from_disk")).status_code == 400
    assert (await subject.client.model_info())["weight_version"] == "default"
    answer = (await subject.ask(prompt_of(18), 10)).json()
    assert subject.deviation(0, prompt_of(18), answer) < TOLERANCE


async def test_19_weight_sessions_are_opened_and_closed_once(subject: Subject) -> None:
    statuses = [
        (await subject.post(path)).status_code
        for path in ("/begin_weight_update", "/begin_weight_update", "/end_weight_update", "/end_weight_update")
    ]
    assert statuses == [200, 400, 200, 400]


async def test_20_tensors_outside_a_session_are_refused_at_once(subject: Subject) -> None:
    response = await subject.post("/update_weights_from_distributed", names=[], dtypes=[], shapes=[])
    assert response.status_code == 400
    assert "must run between begin_weight_update() and end_weight_update()" in response.json()["message"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scripted"])  # which has no tensors
async def test_20b_tensors_through_a_group_are_the_weights_of_the_disk(
    name: str, spoken: Models, sglang: SGLangProcess | None, embedded: EngineProcess
) -> None:
    async with serve(name, spoken, embedded, sglang.url if sglang else None) as subject:
        group = await WeightGroup.join([subject.client])
        running = subject.start(prompt_of(20), subject.long)
        await subject.until_running(num_tokens=35)
        await subject.client.pause("retract")
        assert await group.send(buckets_in(spoken.paths[1], max_bytes=2**16), "job/1/1") is None
        await subject.client.resume()
        answer = (await running).json()
        cut = spans_of(answer)[0][2]
        assert [name for name, _, _ in spans_of(answer)] == ["default", "job/1/1"]
        assert subject.deviation(0, prompt_of(20), answer, end=cut) < TOLERANCE
        assert subject.deviation(1, prompt_of(20), answer, start=cut) < TOLERANCE
        if subject.is_real:
            sent = (await subject.post("/weights_checker", action="checksum")).json()["per_engine_checksum"]
        await group.close()
        assert (await subject.post("/destroy_weights_update_group", group_name="nobody")).status_code == 400
        await subject.client.load_weights(spoken.paths[1], "job/1/2")
        if subject.is_real:
            read = (await subject.post("/weights_checker", action="checksum")).json()["per_engine_checksum"]
            assert sent == read


@pytest.mark.parametrize("aborts", [True, False])
async def test_21_a_relabel_aborts_everything_unless_told_otherwise(subject: Subject, aborts: bool) -> None:
    running = subject.start(prompt_of(21), subject.long)
    await subject.until_running(num_tokens=35)
    order: dict[str, Any] = {"new_version": "named"} | ({} if aborts else {"abort_all_requests": False})
    assert (await subject.post("/update_weight_version", **order)).status_code == 200
    assert (await running).json()["meta_info"]["finish_reason"]["type"] == ("abort" if aborts else "length")
    assert (await subject.client.model_info())["weight_version"] == "named"


async def test_22_a_request_posted_while_paused_waits(subject: Subject) -> None:
    await subject.client.pause("retract")
    held = subject.start(PROMPT, 3)
    await asyncio.sleep(0.5)
    assert not held.done()
    await subject.client.resume()
    answer = (await held).json()
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["e2e_latency"] > 0.3


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_23_probes_while_paused(subject: Subject, mode: Any) -> None:
    assert await subject.client.is_ready()
    await subject.client.pause(mode)
    statuses = {path: (await subject.get(path)).status_code for path in ("/ready", "/ping", "/model_info", "/v1/loads")}
    assert statuses == {"/ready": 503, "/ping": 200, "/model_info": 200, "/v1/loads": 200}
    assert not await subject.client.is_ready()
    await subject.client.resume()
    assert await subject.client.is_ready()


async def test_23b_health_answers_while_paused_and_a_probe_that_generates_does_not(subject: Subject) -> None:
    """A real one runs with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, as docs/engines.md asks for."""
    await subject.client.pause("retract")
    async with asyncio.timeout(HANG_S):
        assert (await subject.get("/health")).status_code == 200
    if subject.is_real:
        started = time.monotonic()
        assert (await subject.http.get(f"{subject.url}/health_generate", timeout=HANG_S)).status_code == 503
        assert time.monotonic() - started > 15
    await subject.client.resume()
    if subject.is_real:  # the failed probe has made it not ready, a good one ends that
        assert not await subject.client.is_ready()
        assert (await subject.http.get(f"{subject.url}/health_generate", timeout=HANG_S)).status_code == 200
    assert await subject.client.is_ready()


async def test_24_flushing(subject: Subject) -> None:
    await subject.ask(prompt_of(24), 5)
    assert (await subject.ask(prompt_of(24), 5)).json()["meta_info"]["cached_tokens"] == 29
    for response in (await subject.get("/flush_cache"), await subject.post("/flush_cache")):
        assert (response.status_code, response.text.startswith("Cache flushed.")) == (200, True)
    running = subject.start(prompt_of(24), subject.long)
    await subject.until_running()
    refused = await subject.post("/flush_cache")
    assert (refused.status_code, refused.text) == (400, "Flush cache failed.\n")
    waited = await subject.http.post(f"{subject.url}/flush_cache?timeout=60", timeout=HANG_S)
    assert waited.status_code == 200
    assert len((await running).json()["output_ids"]) == subject.long


async def test_25_a_stream_repeats_itself_and_names_versions_at_its_end(subject: Subject) -> None:
    response = await subject.ask(prompt_of(25), 60, stream=True, sampling={"stream_interval": 8})
    if not subject.is_real:  # nobody here streams
        assert (response.status_code, "stream" in response.text) == (400, True)
        assert (await subject.ask(PROMPT, 2)).status_code == 200
        return
    *chunks, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    answers = [json.loads(chunk) for chunk in chunks]
    assert len(answers) > 1
    for before, after in itertools.pairwise(answers):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert "weight_versions" not in before["meta_info"]
    assert spans_of(answers[-1]) == [("default", 0, 60)]
    assert subject.deviation(0, prompt_of(25), answers[-1]) < TOLERANCE


async def test_26_a_client_that_leaves_takes_its_request_along(subject: Subject) -> None:
    running = subject.start(prompt_of(26), CONTEXT_LENGTH - 40, rid="26" * 16)
    await subject.until_running()
    running.cancel()
    async with asyncio.timeout(HANG_S):
        while (await subject.load())["num_running_reqs"]:
            await asyncio.sleep(0.02)


async def test_27_a_label_stays_until_the_next_one(subject: Subject, spoken: Models) -> None:
    await subject.client.load_weights(spoken.paths[1], "job/1/1")
    unlabelled = await subject.post("/update_weights_from_disk", model_path=str(spoken.paths[2]))
    assert unlabelled.json()["message"].endswith("weights.")
    answer = (await subject.ask(prompt_of(27), 10)).json()
    assert spans_of(answer) == [("job/1/1", 0, 10)]  # the label lies now
    assert subject.deviation(2, prompt_of(27), answer) < TOLERANCE
    assert (await subject.client.model_info())["weight_version"] == "job/1/1"


async def test_28_paths_that_are_gone(subject: Subject) -> None:
    for path in ("/get_weight_version", "/get_load", "/no_such"):
        assert (await subject.get(path)).status_code == 404
    wrong = await subject.get("/generate")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


async def test_a_later_turn_reuses_all_but_the_last_sampled_token(subject: Subject) -> None:
    prompt = prompt_of(90, 64)
    first = (await subject.ask(prompt, 32)).json()
    longer = [*prompt, *first["output_ids"], *prompt_of(91, 10)]
    second = (await subject.ask(longer, 5)).json()
    assert second["meta_info"]["cached_tokens"] == 64 + 32 - 1
    assert subject.deviation(0, longer, second) < TOLERANCE


async def test_many_requests_at_once_keep_their_own_logprobs(subject: Subject) -> None:
    asks = [(prompt_of(100 + number, 5 + 7 * number), 40 - number) for number in range(24)]
    answers = await asyncio.gather(*(subject.ask(prompt, num) for prompt, num in asks))
    assert all(
        subject.deviation(0, prompt, answer.json()) < TOLERANCE
        for (prompt, _), answer in zip(asks, answers, strict=True)
    )


async def test_30_its_load_is_read(subject: Subject) -> None:
    running = subject.start(prompt_of(30), subject.long)
    await subject.until_running(num_tokens=35)
    load = await subject.client.load()
    assert (load.num_running, load.num_waiting) == (1, 0)
    assert load.age_s < 5
    running.cancel()


async def test_29_the_self_test_finds_nothing_wrong(subject: Subject) -> None:
    assert await problem_of(subject.client) is None


@pytest.mark.parametrize("ids", [[[]], [5, VOCAB_SIZE + 500]])
@pytest.mark.parametrize("name", NAMES)
async def test_11b_input_that_ends_a_real_engine(
    name: str, ids: Any, spoken: Models, embedded: EngineProcess, tmp_path: Path
) -> None:
    """A real one has a process of its own to lose. The embedded one answers 400 and lives; our client never sends such
    ids."""
    real = start_sglang(spoken, tmp_path / "log") if name == "sglang" else None
    try:
        async with serve(name, spoken, embedded, real.url if real else None) as subject:  # type: ignore[arg-type]
            if name == "embedded":
                assert (await subject.post("/generate", input_ids=ids)).status_code == 400
                assert (await subject.ask(PROMPT, 2)).status_code == 200
                return
            with pytest.raises(httpx.TransportError):
                async with asyncio.timeout(200):
                    await subject.post("/generate", input_ids=ids)
            async with asyncio.timeout(HANG_S):  # a real one takes a moment to be gone
                while await subject.is_reachable():
                    await asyncio.sleep(0.2)
    finally:
        if real is not None:
            real.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scripted"])  # which has no shapes
async def test_18b_weights_of_other_shapes_end_a_real_engine(
    name: str, spoken: Models, embedded: EngineProcess, tmp_path: Path
) -> None:
    """A real one has a process of its own. The embedded one answers 400 and serves its old weights on; a job checks
    first."""
    real = start_sglang(spoken, tmp_path / "log") if name == "sglang" else None
    order = {"model_path": str(make_model(tmp_path / "wide", seed=1, hidden_size=128)), "weight_version": "job/1/1"}
    try:
        async with serve(name, spoken, embedded, real.url if real else None) as subject:  # type: ignore[arg-type]
            if name == "embedded":
                refused = await subject.post("/update_weights_from_disk", **order)
                assert (refused.status_code, refused.json()["success"]) == (400, False)
                assert "shape" in refused.json()["message"]
                assert (await subject.client.model_info())["weight_version"] == "default"
                answer = (await subject.ask(PROMPT, 5)).json()
                assert subject.deviation(0, PROMPT, answer) < TOLERANCE
                return
            with pytest.raises(httpx.TransportError):
                async with asyncio.timeout(200):
                    await subject.post("/update_weights_from_disk", **order)
            async with asyncio.timeout(HANG_S):
                while await subject.is_reachable():
                    await asyncio.sleep(0.2)
    finally:
        if real is not None:
            real.close()
