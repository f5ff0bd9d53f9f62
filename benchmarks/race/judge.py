"""Held-out success of saved weights, the same way for whoever trained them: after the race, out of its time.

Rule: the same tasks, the same seeds for every model, sampled as in training. Each result is kept in a file at once.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch

from benchmarks.race.play import play
from benchmarks.race.setting import RaceSetting
from examples.demo.demonstrations import COURSE
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import load_environment
from gspo_core.types import Split
from services.engine.checkpoint import read_checkpoint
from services.engine.engine import EmbeddedEngine
from services.engine.model import Decoder
from services.engine.scheduler import GenerateRequest, Scheduler

CONCURRENCY = 64


class Judge:
    """Loads the model's shape once; then any weights of that shape."""

    def __init__(self, model: Path, setting: RaceSetting, results: Path, *, tasks: int, episodes_per_task: int) -> None:
        torch.set_num_threads(1)
        self._setting = setting
        self._results = results
        self._episodes = [(task, draw) for task in range(tasks) for draw in range(episodes_per_task)]
        self._environment = load_environment(COURSE.environment)
        self._codec = HermesCodec(load_tokenizer(model))
        self._decoder = Decoder(model, device=torch.device("cpu"), dtype=torch.float32, context_length=None)
        self._known: dict[str, float] = json.loads(results.read_text()) if results.exists() else {}

    def success(self, name: str, weights: Path) -> float:
        if name not in self._known:
            self._load(weights)
            self._known[name] = asyncio.run(self._play_all())
            self._results.write_text(json.dumps(self._known, indent=1) + "\n")
        return self._known[name]

    @torch.inference_mode()
    def _load(self, weights: Path) -> None:
        shapes = {name: tensor.shape for name, tensor in self._decoder.parameters.items()}
        self._decoder.load(read_checkpoint(weights, shapes, self._decoder.tied))

    async def _play_all(self) -> float:
        scheduler = Scheduler(self._decoder, max_concurrency=CONCURRENCY, prefix_cache_bytes=2**26)
        engine = EmbeddedEngine(self._decoder, scheduler, Path())
        room = asyncio.Semaphore(CONCURRENCY)
        stepping = asyncio.create_task(engine.run())

        async def one(task: int, draw: int) -> float:
            num_turns = 0

            async def sample(prompt: list[int]) -> list[int]:
                nonlocal num_turns
                num_turns += 1
                return await self._sample(engine, prompt, f"{task}/{draw}/{num_turns}")

            async with room:
                turns = self._setting.max_turns
                return (await play(self._environment, self._codec, Split.EVAL, task, turns, sample)).reward

        try:
            rewards = await asyncio.gather(*(one(*episode) for episode in self._episodes))
        finally:
            stepping.cancel()
        return sum(rewards) / len(rewards)

    async def _sample(self, engine: EmbeddedEngine, prompt: list[int], name: str) -> list[int]:
        task, draw, turn = map(int, name.split("/"))
        request = GenerateRequest(
            rid=name,
            prompt=prompt,
            max_new_tokens=self._setting.max_turn_tokens,
            temperature=self._setting.temperature,
            stop_token_ids=frozenset(self._codec.stop_ids),
            seed=(task * 1_000 + draw) * 10 + turn,
            cache_space=None,
            done=asyncio.get_running_loop().create_future(),
        )
        await engine.generate(request)
        return request.output_ids
