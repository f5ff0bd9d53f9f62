"""What callers rely on, in the words of the protocol alone: one list of cases for every kind of engine.

Embedded and scripted always; a real SGLang and a real vLLM where ``GSPO_TEST_SGLANG_VENV`` and ``GSPO_TEST_VLLM_VENV``
name their environments. What each kind does beyond the protocol has test files of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.engines.kinds import open_engines
from services.engines.probe import problem_of
from services.engines.protocol import Engine, EngineError, EngineRejected, Generation
from tests.apparatus.sglang_process import SGLangProcess
from tests.apparatus.vllm_process import VllmProcess
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.conformance_subjects import SGLANG_VENV, Subject, add_tokenizer, serve
from tests.services.engines.engine_kit import (
    NUM_VERSIONS,
    UNHURRIED,
    VOCAB_SIZE,
    EngineProcess,
    Models,
    make_model,
    max_difference,
    random_prompt,
)

VLLM_VENV = os.environ.get("GSPO_TEST_VLLM_VENV")
# One that runs already, with a model of the same tensors, and reads our folders.
VLLM_URL = os.environ.get("GSPO_TEST_VLLM_URL")
NAMES = ["embedded", "scripted", *(["sglang"] if SGLANG_VENV else []), *(["vllm"] if VLLM_VENV or VLLM_URL else [])]
# The order of float32 additions only.
TOLERANCE = 1e-4
DEADLINE_S = HANG_S
# Tokens of a request that is long enough to be interfered with; no stop token ends it early.
LONG = 300
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Versions with a tokenizer, and heads of a size for which vLLM has a kernel on a CPU."""
    root = tmp_path_factory.mktemp("spoken")
    versions = (make_model(root / f"v{version}", seed=version, head_dim=32) for version in range(NUM_VERSIONS))
    models = Models(tuple(versions))
    for path in models.paths:
        add_tokenizer(path, eos=None)  # nothing but what a case asks for ends an answer
    return models


@pytest.fixture(scope="module")
def real(spoken: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of real servers, by kind; each is started once, when a case first asks for it."""
    started: dict[str, SGLangProcess | VllmProcess] = {}

    class Servers(dict[str, str]):
        def __missing__(self, name: str) -> str:
            venv = SGLANG_VENV if name == "sglang" else VLLM_VENV
            assert venv is not None
            process = SGLangProcess if name == "sglang" else VllmProcess
            started[name] = process(Path(venv), spoken.paths[0], tmp_path_factory.mktemp(name) / "log")
            self[name] = started[name].url
            return self[name]

    yield Servers({"vllm": VLLM_URL} if VLLM_URL else {})
    for one in started.values():
        one.close()


@pytest.fixture(scope="module")
def embedded(spoken: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    engine = EngineProcess(spoken.paths[0], python=warm_python.path, module=UNHURRIED)
    yield engine
    engine.close()


@dataclass
class Case:
    """An engine that holds version 0 under the label ``default`` and runs nothing, and the truth about its models."""

    name: str
    engine: Engine
    models: Models
    truth: Callable[[int, list[int], list[int], float], list[float]]

    async def deviation(
        self, version: int, prompt: list[int], answer: Generation, temperature: float = 1.0, *, start: int = 0
    ) -> float:
        return await self.deviation_until(version, prompt, answer, len(answer.output_ids), temperature, start=start)

    async def deviation_until(
        self,
        version: int,
        prompt: list[int],
        answer: Generation,
        end: int,
        temperature: float = 1.0,
        *,
        start: int = 0,
    ) -> float:
        """How far the reported log-probs of ``output_ids[start:end]`` are from those of one version."""
        true = await asyncio.to_thread(self.truth, version, prompt, answer.output_ids[:end], temperature)
        return max_difference(answer.logprobs[start:end], true[start:])

    async def ask(self, prompt: list[int], num: int, *, temperature: float = 1.0, **more: str | None) -> Generation:
        return await self.engine.generate(
            prompt, max_new_tokens=num, temperature=temperature, stop_token_ids=[], vocab_size=VOCAB_SIZE, **more
        )

    async def until_running(self, number: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.engine.load()).num_running < number:
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.engine.load()).num_running:
                await asyncio.sleep(0.02)


@pytest.fixture(params=NAMES)
async def case(
    request: pytest.FixtureRequest, spoken: Models, embedded: EngineProcess, real: dict[str, str]
) -> AsyncIterator[Case]:
    name = request.param
    if name != "vllm":
        url = real[name] if name == "sglang" else None
        async with serve(name, spoken, embedded, url) as subject:
            yield Case(name, subject.client, spoken, _truth_of(subject))
        return
    async with open_engines() as connect:
        engine = connect(real[name])
        await engine.pause("abort")
        await engine.load_weights(spoken.paths[0], "default")
        await engine.resume()
        yield Case(name, engine, spoken, spoken.logprobs)


def _truth_of(subject: Subject) -> Callable[[int, list[int], list[int], float], list[float]]:
    return lambda version, prompt, output, temperature: subject.logprobs(version, prompt, output, temperature)


def prompt_of(number: int, length: int = 30) -> list[int]:
    return random_prompt(random.Random(number), length)


def spans_of(answer: Generation) -> list[tuple[str, int, int]]:
    return [(span.label, span.start, span.end) for span in answer.spans]


async def test_it_names_its_weights_and_can_be_trained_from(case: Case) -> None:
    assert (await case.engine.info()).label == "default"
    assert (await case.engine.capabilities()).names_versions
    assert await case.engine.is_ready()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_log_probs_are_those_of_the_requested_temperature(case: Case, temperature: float) -> None:
    answer = await case.ask(prompt_of(2), 40, temperature=temperature)
    assert (len(answer.output_ids), spans_of(answer)) == (40, [("default", 0, 40)])
    assert await case.deviation(0, prompt_of(2), answer, temperature) < TOLERANCE
    assert await case.deviation(0, prompt_of(2), answer, 2 * temperature) > 100 * TOLERANCE


async def test_a_greedy_answer_reports_temperature_one(case: Case) -> None:
    answers = [await case.ask(prompt_of(3), 8, temperature=0.0) for _ in range(2)]
    assert answers[0].output_ids == answers[1].output_ids
    assert await case.deviation(0, prompt_of(3), answers[0]) < TOLERANCE


async def test_scores_are_those_of_the_given_ids_at_temperature_one(case: Case) -> None:
    ids = prompt_of(4, 60)
    logprobs, label = await case.engine.score(ids)
    true = await asyncio.to_thread(case.truth, 0, ids[:1], ids[1:], 1.0)
    assert (label, max_difference(logprobs, true) < TOLERANCE) == ("default", True)


async def test_a_stop_token_ends_the_answer_and_is_kept(case: Case) -> None:
    first = await case.ask(prompt_of(5), 6, temperature=0.0)
    stop = first.output_ids[2]
    again = await case.engine.generate(prompt_of(5), max_new_tokens=6, temperature=0.0, stop_token_ids=[stop])
    end = first.output_ids.index(stop) + 1
    assert (again.output_ids, again.finish_reason) == (first.output_ids[:end], "stop")


async def test_an_abort_returns_what_was_sampled_and_ends_that_request_alone(case: Case) -> None:
    aborted, other = (asyncio.create_task(case.ask(prompt_of(6), LONG, rid=letter * 32)) for letter in "ab")
    await case.until_running(2)
    await case.engine.abort("c" * 32)  # nobody's
    await case.engine.abort("a" * 32)
    answer = await aborted
    assert (answer.finish_reason, len(answer.output_ids) < LONG) == ("abort", True)
    assert await case.deviation(0, prompt_of(6), answer) < TOLERANCE
    assert ((await other).finish_reason, len((await other).output_ids)) == ("length", LONG)


async def test_a_cancelled_call_ends_its_request(case: Case) -> None:
    running = asyncio.create_task(case.ask(prompt_of(7), LONG + 150))
    await case.until_running()
    running.cancel()
    await case.until_idle()


async def test_a_retracted_request_goes_on_under_the_new_weights_as_if_they_had_read_it_all(case: Case) -> None:
    running = asyncio.create_task(case.ask(prompt_of(8), LONG))
    await case.until_running()
    await case.engine.pause("retract")
    assert not await case.engine.is_ready()
    await case.engine.load_weights(case.models.paths[1], "job/1/1")
    await case.engine.resume()
    answer = await running
    cut = answer.spans[0].end
    assert [span.label for span in answer.spans] == ["default", "job/1/1"]
    assert await case.deviation_until(0, prompt_of(8), answer, cut) < TOLERANCE
    assert await case.deviation(1, prompt_of(8), answer, start=cut) < TOLERANCE
    assert (len(answer.output_ids), (await case.engine.info()).label) == (LONG, "job/1/1")


async def test_a_request_kept_in_place_keeps_its_log_probs_and_a_new_one_stands_on_no_stale_keys(case: Case) -> None:
    running = asyncio.create_task(case.ask(prompt_of(9, 200), LONG, extra_key="job/1/0"))
    await case.until_running()
    await case.engine.pause("in_place")
    await case.engine.load_weights(case.models.paths[1], "job/1/1", flush_cache=False)
    await case.engine.resume()
    fresh = await case.ask(prompt_of(9, 200), 20, extra_key="job/1/1")
    answer = await running
    cut = answer.spans[0].end
    assert [span.label for span in answer.spans] == ["default", "job/1/1"]
    assert await case.deviation_until(0, prompt_of(9, 200), answer, cut) < TOLERANCE
    assert await case.deviation(1, prompt_of(9, 200), answer, start=cut) > 100 * TOLERANCE  # on old keys and values
    assert (spans_of(fresh), fresh.cached_tokens) == ([("job/1/1", 0, 20)], 0)
    assert await case.deviation(1, prompt_of(9, 200), fresh) < TOLERANCE


async def test_a_pause_that_aborts_hands_over_what_was_sampled(case: Case) -> None:
    running = asyncio.create_task(case.ask(prompt_of(10), LONG))
    await case.until_running()
    await case.engine.pause("abort")
    answer = await running
    await case.engine.resume()
    assert (answer.finish_reason, len(answer.output_ids) < LONG) == ("abort", True)
    assert await case.deviation(0, prompt_of(10), answer) < TOLERANCE


async def test_what_is_asked_while_it_is_paused_is_answered_by_the_weights_it_resumes_with(case: Case) -> None:
    await case.engine.pause("retract")
    held = asyncio.create_task(case.ask(prompt_of(11), 5))
    await case.engine.load_weights(case.models.paths[2], "job/1/2")
    assert not held.done()
    await case.engine.resume()
    answer = await held
    assert spans_of(answer) == [("job/1/2", 0, 5)]
    assert await case.deviation(2, prompt_of(11), answer) < TOLERANCE


async def test_a_folder_that_is_not_there_changes_nothing(case: Case, tmp_path: Path) -> None:
    await case.engine.pause("retract")
    with pytest.raises(EngineRejected):
        await case.engine.load_weights(tmp_path / "nowhere", "job/1/1")
    await case.engine.resume()
    answer = await case.ask(prompt_of(12), 10)
    assert spans_of(answer) == [("default", 0, 10)]
    assert await case.deviation(0, prompt_of(12), answer) < TOLERANCE


async def test_weights_of_other_shapes_are_refused_by_those_that_can(case: Case, tmp_path: Path) -> None:
    """They end a real SGLang, and the scripted engine has no shapes; embedded and vLLM serve their old ones on."""
    if case.name in ("sglang", "scripted"):
        pytest.skip("it has no such check")
    await case.engine.pause("retract")
    with pytest.raises(EngineError):
        await case.engine.load_weights(make_model(tmp_path / "wide", seed=1, hidden_size=128), "job/1/1")
    await case.engine.resume()
    answer = await case.ask(prompt_of(13), 10)
    assert spans_of(answer) == [("default", 0, 10)]
    assert await case.deviation(0, prompt_of(13), answer) < TOLERANCE


async def test_twenty_switches_under_load_leave_no_token_under_a_wrong_label(case: Case) -> None:
    async def play(number: int) -> tuple[list[int], Generation]:
        prompt = prompt_of(200 + number)
        return prompt, await case.ask(prompt, 200)

    playing = [asyncio.create_task(play(number)) for number in range(8)]
    await case.until_running()
    versions = {"default": 0}
    for number in range(20):
        version = (number + 1) % NUM_VERSIONS
        versions[f"job/1/{number}"] = version
        await case.engine.pause("retract")
        await case.engine.load_weights(case.models.paths[version], f"job/1/{number}")
        await case.engine.resume()
    checked = set()
    for prompt, answer in await asyncio.gather(*playing):
        for span in answer.spans:
            found = await case.deviation_until(versions[span.label], prompt, answer, span.end, start=span.start)
            assert found < TOLERANCE, span
            checked.add(span.label)
    assert len(checked) > 2


async def test_a_prefix_is_reused_within_a_key_and_not_across_keys(case: Case) -> None:
    prompt = prompt_of(14, 300)
    await case.ask(prompt, 3, extra_key="a/b@c")
    assert (await case.ask(prompt, 3, extra_key="a/b@c")).cached_tokens > 0
    other = await case.ask(prompt, 3, extra_key="a/b@d")
    assert other.cached_tokens == 0
    assert await case.deviation(0, prompt, other) < TOLERANCE


async def test_many_requests_at_once_keep_their_own_log_probs(case: Case) -> None:
    asks = [(prompt_of(100 + number, 5 + 7 * number), 40 - number) for number in range(24)]
    answers = await asyncio.gather(*(case.ask(prompt, num) for prompt, num in asks))
    for (prompt, num), answer in zip(asks, answers, strict=True):
        assert len(answer.output_ids) == num
        assert await case.deviation(0, prompt, answer) < TOLERANCE


async def test_ids_outside_the_vocabulary_are_never_sent(case: Case) -> None:
    with pytest.raises(EngineRejected, match="not sent"):
        await case.ask([1, VOCAB_SIZE], 3)
    assert len((await case.ask(prompt_of(15), 3)).output_ids) == 3


async def test_its_load_counts_what_runs(case: Case) -> None:
    assert (await case.engine.load()).num_running == 0
    running = [asyncio.create_task(case.ask(prompt_of(16), LONG)) for _ in range(3)]
    await case.until_running(3)
    load = await case.engine.load()
    assert (load.num_running, load.num_waiting, load.num_held_tokens > 0) == (3, 0, True)
    for one in running:
        one.cancel()
    await case.until_idle()


async def test_who_takes_no_tensors_through_a_group_says_so_and_refuses(case: Case) -> None:
    join = case.engine.join_weight_group(
        host="127.0.0.1", port=1, rank=1, world_size=2, name="n", backend="gloo", timeout_s=1.0
    )
    if not (await case.engine.capabilities()).group_problem:
        join.close()  # type: ignore[attr-defined]
        return
    with pytest.raises(EngineRejected):
        await join


async def test_the_self_test_finds_nothing_wrong(case: Case) -> None:
    assert await problem_of(case.engine) is None
