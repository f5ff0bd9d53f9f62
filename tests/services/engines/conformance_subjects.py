"""The engines that the conformance suite runs against, and what each offers beyond the client's subset.

``embedded`` and ``scripted`` always; a real SGLang where ``GSPO_TEST_SGLANG_VENV`` names its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from services.engines.http_engine import open_http
from services.engines.protocol import Generation
from services.engines.sglang import EngineClient
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport
from tests.apparatus.scripted_engine.language import true_logprobs
from tests.apparatus.sglang_process import SGLangProcess
from tests.patience import HANG_S
from tests.services.engines.engine_kit import CONTEXT_LENGTH, VOCAB_SIZE, EngineProcess, Models, max_difference

SGLANG_VENV = os.environ.get("GSPO_TEST_SGLANG_VENV")
NAMES = ["embedded", "scripted", *(["sglang"] if SGLANG_VENV else [])]
DEADLINE_S = HANG_S


@dataclass
class Subject:
    name: str
    url: str
    http: httpx.AsyncClient
    models: Models
    long: int = 300
    """Tokens of a request that is long enough to be interfered with."""
    spread: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def is_real(self) -> bool:
        return self.name == "sglang"

    @property
    def has_sglangs_traps(self) -> bool:
        """Whether it does what hurts as SGLang does it, or what the embedded engine does instead."""
        return self.name != "embedded"

    @property
    def client(self) -> EngineClient:
        return EngineClient(self.url, self.http)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(self.url + path, json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(self.url + path)

    async def is_reachable(self) -> bool:
        try:
            await self.get("/ping")
        except httpx.ConnectError:
            return False
        except httpx.TransportError:
            return True
        return True

    async def ask(self, prompt: Sequence[int], num: int, **changes: Any) -> httpx.Response:
        sampling = {"max_new_tokens": num, "temperature": 1.0, "ignore_eos": True, **changes.pop("sampling", {})}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **changes}
        return await self.post("/generate", **body)

    def start(self, prompt: Sequence[int], num: int, **changes: Any) -> asyncio.Task[httpx.Response]:
        task = asyncio.create_task(self.ask(prompt, num, **changes))
        self.spread.add(task)
        return task

    async def load(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.loads())["loads"][0]
        return found

    async def until_running(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """``num_requests`` run and hold ``num_tokens`` in the cache."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                load = await self.load()
                if load["num_running_reqs"] >= num_requests and load["num_used_tokens"] >= num_tokens:
                    return
                await asyncio.sleep(0.005)

    def logprobs(self, version: int, prompt: Sequence[int], output: Sequence[int], temperature: float) -> list[float]:
        if self.name == "scripted":
            return true_logprobs(str(self.models.paths[version]), prompt, output, temperature, VOCAB_SIZE)
        return self.models.logprobs(version, prompt, output, temperature)

    def deviation(
        self,
        version: int,
        prompt: Sequence[int],
        answer: dict[str, Any] | Generation,
        temperature: float = 1.0,
        *,
        start: int = 0,
        end: int | None = None,
    ) -> float:
        """How far the reported log-probs of ``output[start:end]`` are from those of one version."""
        if isinstance(answer, Generation):
            ids, reported = answer.output_ids, answer.logprobs
        else:
            ids = answer["output_ids"]
            reported = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        expected = self.logprobs(version, prompt, ids[:end], temperature)
        return max_difference(reported[start:end], expected[start:])


def add_tokenizer(model_dir: Path, *, eos: str | None = "<0>") -> None:
    """SGLang does not start without one. Bytes, then names for the rest of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{number}>" for number in range(VOCAB_SIZE - len(letters)))]
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<1>").save_pretrained(model_dir)


@contextlib.asynccontextmanager
async def serve(name: str, models: Models, embedded: EngineProcess, sglang_url: str | None) -> AsyncIterator[Subject]:
    """The subject, idle, with version 0 under the label ``default``."""
    async with contextlib.AsyncExitStack() as stack:
        if name == "scripted":
            engine = ScriptedEngine(models.paths[0], vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, tick_s=0.001)
            ticking = asyncio.create_task(engine.run())
            stack.callback(ticking.cancel)
            transport = ScriptedTransport({"engine": engine})
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport))
            subject = Subject(name, "http://engine", http, models)
        else:
            http = await stack.enter_async_context(open_http())
            url = sglang_url if name == "sglang" else embedded.url
            assert url is not None
            subject = Subject(name, url, http, models)
            await subject.client.pause("abort")
            await subject.client.load_weights(models.paths[0], "default")
            await subject.client.resume()
        yield subject
        for task in subject.spread:
            task.cancel()
        await asyncio.gather(*subject.spread, return_exceptions=True)


def start_sglang(models: Models, log_path: Path) -> SGLangProcess:
    assert SGLANG_VENV is not None
    return SGLangProcess(Path(SGLANG_VENV), models.paths[0], log_path)
