"""What the engine tests share: tiny random models in three versions, a real server process, and plain log-probs.

The reference is always transformers' own forward over the whole sequence, without any cache.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from services.engines.protocol import Generation
from services.engines.sglang import EngineClient
from services.process.children import die_with_parent
from services.process.ports import free_port
from tests.patience import HANG_S

NUM_VERSIONS = 3
VOCAB_SIZE = 300
CONTEXT_LENGTH = 512
_DEADLINE_S = HANG_S


def make_model(directory: Path, *, seed: int, hidden_size: int = 64, head_dim: int = 16) -> Path:
    """A random Qwen3 whose distributions are far from flat, so that a wrong context or version shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones in every version, which would hide one that is not loaded
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Models:
    """Weights of one shape; ``paths[v]`` holds version ``v``."""

    paths: tuple[Path, ...]

    @functools.lru_cache(maxsize=NUM_VERSIONS)  # noqa: B019 - lives as long as the test session
    def reference(self, version: int) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.paths[version], dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, version: int, prompt: Sequence[int], output: Sequence[int], temperature: float) -> list[float]:
        """Of each output token, by one plain forward over prompt and output."""
        ids = torch.tensor([*prompt, *output])
        logits = self.reference(version)(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits / temperature, -1)
        return logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1).tolist()

    def deviation(self, version: int, prompt: Sequence[int], generation: Generation, temperature: float) -> float:
        """How far the reported log-probs are from those of one version."""
        expected = self.logprobs(version, prompt, generation.output_ids, temperature)
        return max_difference(generation.logprobs, expected)


def max_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


def random_prompt(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


UNHURRIED = ("tests.services.engines.unhurried_engine",)
"""For ``module``, where a test acts while a request runs."""


class EngineProcess:
    """``python -m services.engine`` as a child."""

    def __init__(
        self,
        model: Path,
        *options: str,
        python: Path | str = sys.executable,
        module: Sequence[str] = ("services.engine",),
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", *module, "--model", str(model), "--port", str(port), *options]
        self.process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent()
        )
        deadline = time.monotonic() + _DEADLINE_S
        while not self._is_ready():
            assert self.process.poll() is None, f"the engine ended with {self.process.returncode} while it started"
            assert time.monotonic() < deadline, "the engine did not become ready"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=_DEADLINE_S)


async def load_of(client: EngineClient) -> dict[str, Any]:
    load: dict[str, Any] = (await client.loads())["loads"][0]
    return load


async def until_load(client: EngineClient, name: str, at_least: int) -> None:
    """Waits until a number of ``/v1/loads`` has grown to ``at_least``."""
    async with asyncio.timeout(_DEADLINE_S):
        while (await load_of(client))[name] < at_least:
            await asyncio.sleep(0.002)


async def until_idle(client: EngineClient) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while (load := await load_of(client))["num_running_reqs"] or load["num_waiting_reqs"]:
            await asyncio.sleep(0.01)
