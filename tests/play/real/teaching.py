"""Makes the model of a real play: Qwen3's shape and vocabulary, two small layers, taught to speak as harnesses hear.

Rule: it is taught on prompts that harnesses really sent, in a short play before the scripted stage, each followed by
what ``speech`` draws for it. Mostly on the end of a prompt, of every length, now and then on the whole of it: what
tells the model where it is lies near, and all that is far has to be read past.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import services.episodes.outbox
from gspo_core.chat import HermesCodec
from gspo_core.starter.untrained import shape_of
from services.state.client import connect
from services.state.server import RedisServer
from tests.core.qwen_vocabulary import qwen_vocabulary
from tests.play.real.agent import players, task_of
from tests.play.real.speech import Speaker, Speech
from tests.play.run import qwen_codec
from tests.play.stage import set_up

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

CONTEXT_TOKENS = 40_960
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "rope_theta": 1e6,
}
NUM_STEPS = 900
BATCH_SIZE = 16
SHORTEST, USUAL = 32, 512
"""Tokens of a prompt's end."""
LONG_EVERY = 3
"""Steps; of those, the prompt's end is longer, up to the whole of it."""
PEAK_LR = 4e-3
SAID_EVERY = 60
NUM_NEGATIVES = 2048
"""Of the ids that are never to be said, drawn anew for each step: they stand for the rest of the vocabulary."""
NUM_DRAWN = 400
"""Turns of each tongue, whose ids are told apart exactly."""

MOST = 20_000
MOST_PROMPTS = 240
"""Of each tongue."""

Prompts = dict[str, list[list[int]]]
"""By the tongue."""


def heard(seed: int, folder: Path, names: Sequence[str], each: int, at_once: int = 2) -> Prompts:
    """Prompts of all turns of a short play before the scripted stage."""
    services.episodes.outbox.DISTANCE_S = 0.0
    found: Prompts = {}
    speech = Speech(qwen_codec())
    for name in names:
        for prompt in asyncio.run(_heard(name, seed, folder / name.replace(" ", "-"), each, at_once)):
            found.setdefault(speech.tongue(prompt), []).append(prompt)
    rng = random.Random(seed)
    return {tongue: rng.sample(prompts, min(MOST_PROMPTS, len(prompts))) for tongue, prompts in found.items()}


async def _heard(name: str, seed: int, folder: Path, each: int, at_once: int) -> list[list[int]]:
    given = [task_of(name, seed, number) for number in range(each)]
    (folder / "redis").mkdir(parents=True)
    with RedisServer.spawn(folder / "redis") as server:
        redis = connect(server.url)
        async with (
            players([name], folder, at_once) as playing,
            set_up(redis, qwen_codec(), seed, lambda task, llm: playing.play(name, task, llm), Speaker) as stage,
        ):
            parts = await stage.play(given, at_once)
        await redis.aclose()
    return [part.policy.served[begin].prompt for part in parts for begin in part.policy.begins]


def make(directory: Path, prompts: Prompts, seed: int, say: Callable[[str], None] = print) -> None:
    """A model, with the vocabulary."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    codec = qwen_codec()
    model = Qwen3ForCausalLM(shape_of(codec, CONTEXT_TOKENS, ARCHITECTURE))
    Teacher(model, codec, prompts, random.Random(seed), say).teach()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    shutil.copyfile(qwen_vocabulary() / "tokenizer.json", directory / "tokenizer.json")


class Teacher:
    def __init__(
        self,
        model: Qwen3ForCausalLM,
        codec: HermesCodec,
        prompts: Prompts,
        rng: random.Random,
        say: Callable[[str], None],
    ) -> None:
        import torch

        self._model, self._rng, self._say = model, rng, say
        self._speech = Speech(codec)
        self._prompts = prompts
        drawn = [self._draw(tongue)[1] for tongue in prompts for _ in range(NUM_DRAWN)]
        known = sorted({token for said in drawn for token in said})
        self._known = torch.tensor(known)
        self._place = {token: place for place, token in enumerate(known)}
        others = np.setdiff1d(np.arange(codec.tokenizer.vocab_size), known)
        self._others = torch.from_numpy(others)

    def teach(self) -> None:
        import torch

        model, began = self._model.train(), time.monotonic()
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0)
        losses: list[float] = []
        for step in range(NUM_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / NUM_STEPS))
            loss = self._loss(self._batch(step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if step % SAID_EVERY == SAID_EVERY - 1:
                last = losses[-SAID_EVERY:]
                long = sum(last[LONG_EVERY - 1 :: LONG_EVERY]) * LONG_EVERY / SAID_EVERY
                mean, seconds = sum(last) / SAID_EVERY, time.monotonic() - began
                self._say(
                    f"step {step + 1}, loss {mean:.3f} a token, {long:.3f} where prompts are long, {seconds:.0f} s"
                )
        model.eval()

    def _draw(self, tongue: str) -> tuple[list[int], list[int]]:
        prompt = self._rng.choice(self._prompts[tongue])
        return prompt, self._speech.turn(prompt, tongue, self._rng)

    def _batch(self, step: int) -> list[tuple[list[int], list[int]]]:
        """Ends of prompts, and what is said behind each."""
        rng, tongues = self._rng, list(self._prompts)
        if step % LONG_EVERY == LONG_EVERY - 1:
            prompt, said = self._draw(rng.choice(tongues))
            return [(prompt[-round(USUAL * (MOST / USUAL) ** rng.random()) :], said)]
        drawn = [self._draw(rng.choice(tongues)) for _ in range(BATCH_SIZE)]
        length = round(SHORTEST * (USUAL / SHORTEST) ** rng.random())
        return [(prompt[-length:], said) for prompt, said in drawn]

    def _loss(self, batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Mean over what is said, as if over the whole vocabulary."""
        import torch

        width = max(len(prompt) + len(said) for prompt, said in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        rows, places, targets = [], [], []
        for row, (prompt, said) in enumerate(batch):
            ids[row, : len(prompt) + len(said)] = torch.tensor([*prompt, *said])
            for place, token in enumerate(said, len(prompt) - 1):
                if token in self._place:
                    rows.append(row)
                    places.append(place)
                    targets.append(self._place[token])
        hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state[rows, places]
        head = self._model.lm_head.weight
        logits = hidden @ head[self._known].T
        drawn = self._others[torch.randint(len(self._others), (NUM_NEGATIVES,))]
        rest = torch.logsumexp(hidden @ head[drawn].T, -1) + math.log(len(self._others) / NUM_NEGATIVES)
        whole = torch.logaddexp(torch.logsumexp(logits, -1), rest)
        mean: torch.Tensor = (whole - logits.gather(1, torch.tensor(targets)[:, None])[:, 0]).mean()
        return mean


def write(path: Path, prompts: Prompts) -> None:
    path.write_text(json.dumps(prompts))


def read(path: Path) -> Prompts:
    found: Prompts = json.loads(path.read_text())
    return found
