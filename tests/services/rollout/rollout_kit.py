"""What tests of the rollout worker share: a byte-level codec, worlds as users write them, a scripted policy.

The queue is the real one on a real server; only who samples is scripted, because a tool call of a random model is luck.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.codec import NEWEST_SCHEMA, decode
from gspo_core.env import Environment, PlainEnvironment
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Segment, Split
from services.engines.protocol import Generation, LabelledSpan
from services.episodes.metering import Counters
from services.episodes.outbox import Outbox
from services.episodes.policy import Sampled
from services.rollout.attempt import EnvironmentDriver
from services.state.keys import job_key
from services.state.queue import Bus, LeasedEpisode
from services.state.retry import Backoff, Retrier
from services.workers.setting import EpisodeSetting, EpisodeSpec
from tests.patience import HANG_S

JOB = "job_rollout"
TRAINER = "trainer-token"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def write_tokenizer(directory: Path) -> Path:
    """Bytes and nothing else: every text has one encoding, and almost no sampled ids are a canonical one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in CONTROL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class Speech:
    """Ids as a policy would sample them."""

    def __init__(self, codec: HermesCodec) -> None:
        self._codec = codec
        self._token = codec.tokenizer.token_id

    def _id(self, token: str) -> int:
        found = self._token(token)
        assert found is not None
        return found

    def say(self, text: str) -> list[int]:
        return [*self._codec.tokenizer.encode_whole(text), self._id("<|im_end|>")]

    def raw_call(self, body: str) -> list[int]:
        ids = self._codec.tokenizer.encode(body)
        return [self._id("<tool_call>"), *ids, self._id("</tool_call>"), self._id("<|im_end|>")]

    def call(self, name: str, **arguments: Any) -> list[int]:
        return self.raw_call(json.dumps({"name": name, "arguments": arguments}))


Answer = Sequence[int] | Callable[[list[int]], Awaitable["Sampled"]]


def sampled(ids: Sequence[int], *spans: tuple[int, int, int], engine: str = "engine-0") -> Sampled:
    """``spans`` are (version, start, end); without any, version 0 sampled it all. Log-probs tell tokens apart."""
    return answer_of(ids, [-0.001 * (1 + number) for number in range(len(ids))], spans or [(0, 0, len(ids))], engine)


def answer_of(
    ids: Sequence[int], logprobs: Sequence[float], spans: Iterable[tuple[int, int, int]], engine: str, **rest: Any
) -> Sampled:
    """``spans`` are (version, start, end)."""
    given = list(spans)
    named = tuple(LabelledSpan(f"job/1/{version}", start, end) for version, start, end in given)
    versions = [version for version, _, _ in given]
    return Sampled.of(Generation(list(ids), list(logprobs), named), versions, engine, **rest)


@dataclass
class ScriptedPolicy:
    """Answers in the given order, in pieces where less is asked for; what it was asked is in ``prompts``."""

    answers: list[Any]
    prompts: list[list[int]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    leaving: asyncio.Event | None = None
    _rest: Sampled | None = None

    async def sample(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        prefer_engine: str = "",
        sampling_seed: int | None = None,
    ) -> Sampled:
        self.prompts.append(list(input_ids))
        self.temperatures.append(temperature)
        answer = self._rest or self.answers.pop(0)
        self._rest = None
        if callable(answer):
            answer = await answer(list(input_ids))
        answer = answer if isinstance(answer, Sampled) else sampled(answer)
        return self._piece(answer, max_new_tokens)

    def _piece(self, whole: Sampled, length: int) -> Sampled:
        num_sampled = len(whole.ids)
        if num_sampled <= length:
            return whole
        self._rest = _slice(whole, length, num_sampled)
        return _slice(whole, 0, length)


def _slice(whole: Sampled, begin: int, end: int) -> Sampled:
    spans = [
        (span.version, max(span.start, begin) - begin, min(span.end, end) - begin)
        for span in whole.spans
        if span.start < end and span.end > begin
    ]
    return answer_of(whole.ids[begin:end], whole.logprobs[begin:end], spans, whole.engine_id)


class Counter:
    """Raise the counter to the target, then say done."""

    tasks = [{"target": number} for number in range(1, 6)]  # noqa: RUF012 as a user writes it
    eval_tasks = [{"target": 3}]  # noqa: RUF012
    replayable = True

    def reset(self, target: int) -> str:
        self.value, self.target = 0, target
        return f"Reach exactly {target}."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: how much
        """
        self.value += amount
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value == self.target)


def world(cls: Any = Counter, **config: Any) -> Environment:
    return PlainEnvironment(cls, config, name=f"tests:{cls.__name__}")


def spec(**changes: Any) -> JobSpec:
    given = {"model": "somewhere", "environments": [{"ref": "tests:Counter"}], "rollout": {"group_size": 2}}
    return JobSpec.model_validate(given | changes)


@dataclass
class Table:
    """A bus with one job, and one worker that has joined."""

    redis: Redis
    bus: Bus
    token: str
    worker: str = "worker-0"

    @classmethod
    async def lay(cls, redis: Redis, worker: str = "worker-0") -> Table:
        bus = Bus(redis, lease_s=0.5)
        await bus.load_functions()
        await redis.hset(job_key(JOB, "trainer"), "token", TRAINER)
        return cls(redis, bus, await bus.join(worker), worker)

    async def dispatch(
        self,
        group: int = 0,
        *,
        size: int = 1,
        split: Split = Split.TRAIN,
        task: int = 1,
        reads: int = NEWEST_SCHEMA,
    ) -> None:
        await self.bus.dispatch(JOB, TRAINER, group, size=size, split=split, task_index=task, reads=reads)

    async def lease(self, limit: int = 1) -> list[LeasedEpisode]:
        return await self.bus.lease(JOB, self.worker, self.token, limit)

    async def segments(self, key: EpisodeKey) -> list[Segment]:
        return [decode(payload) for payload in await self.bus.read_episode(key)]


def make_setting(table: Table, codec: HermesCodec, policy: Any) -> EpisodeSetting:
    counters = Counters()
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.002))
    return EpisodeSetting(
        driver=EnvironmentDriver(),
        codec=codec,
        policy=policy,
        outbox=Outbox(table.bus, JOB, table.token, retrier),
        records=table.bus,
        token=table.token,
        retrier=retrier,
        counters=counters,
        clock=time.monotonic,
        leaving=asyncio.Event(),
    )


def make_order(lease: LeasedEpisode, environment: Environment | None = None, **changes: Any) -> EpisodeSpec:
    return EpisodeSpec.from_spec(spec(**changes), environment or world(), lease, model_context_tokens=4096)


def stitched(segments: Sequence[Segment], name: str = "token_ids") -> list[Any]:
    found: list[Any] = np.concatenate([getattr(segment, name) for segment in segments]).tolist()
    return found


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = HANG_S) -> None:
    """Polls ``condition`` until it holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline, f"did not come true within {timeout_s} s"
        await asyncio.sleep(0.01)


def write_model(directory: Path, *, seed: int, stop_bias: float) -> Path:
    """A tiny random Qwen3. ``stop_bias`` is added, roughly, to the logits of the tokens that end a turn."""
    write_tokenizer(directory)
    codec = HermesCodec(load_tokenizer(directory))
    vocab_size = codec.tokenizer.vocab_size
    hidden, inner, head = 32, 64, 16
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (2 * head, hidden),
        "model.layers.0.self_attn.k_proj.weight": (head, hidden),
        "model.layers.0.self_attn.v_proj.weight": (head, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 2 * head),
        "model.layers.0.self_attn.q_norm.weight": (head,),
        "model.layers.0.self_attn.k_norm.weight": (head,),
        "model.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "model.layers.0.mlp.up_proj.weight": (inner, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, inner),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden),
    }
    generator = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, dtype=np.float32) if "norm" in name else generator.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    # A hidden dimension that is alike for every token, so that one row of the head can carry a bias.
    tensors["model.embed_tokens.weight"][:, 0] = 3.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][list(codec.stop_ids), 0] = stop_bias / hidden**0.5
    save_file(tensors, directory / "model.safetensors")
    return directory


def load_codec(directory: Path) -> HermesCodec:
    return HermesCodec(load_tokenizer(write_tokenizer(directory)))
