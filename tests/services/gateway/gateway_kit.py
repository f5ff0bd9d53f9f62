"""What tests of the gateway share: a policy that says anything, records without a server, and the judge of a record.

Every token that the policy samples has a log-prob of its own, so a record shows whether each is trained exactly once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gspo_core.chat import HermesCodec
from gspo_core.codec import NEWEST_SCHEMA, decode
from gspo_core.messages import Message, ToolSchema
from gspo_core.types import EpisodeKey, Segment, Split
from services.episodes.metering import Counters, Meter, Timings
from services.episodes.outbox import Outbox
from services.episodes.policy import Sampled
from services.episodes.tree import TokenTree
from services.gateway.agent.episode import AgentEpisode
from services.gateway.agent.live import Delivery
from services.gateway.dialects.turns import Answer, TurnRequest
from services.state.queue import Append, Fenced, Gap, Kept, LeasedEpisode, Snapshot
from services.state.retry import Backoff, Retrier
from services.workers.setting import EpisodeSetting, EpisodeSpec
from tests.services.rollout.rollout_kit import JOB, Speech, answer_of, make_order, world

ADD: ToolSchema = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}}},
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(answer: Answer) -> Message:
    """The answer as a client sends it back."""
    message: Message = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(answer.call_ids, answer.calls, strict=True)
        ]
    return message


def result(answer: Answer, text: str, place: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": answer.call_ids[place], "content": text}


def request(*messages: Message, **fields: Any) -> TurnRequest:
    """With the digest that a dialect would give it."""
    parts = {name: fields.get(name) for name in ("tools", "choice", "max_tokens", "stop")}
    said = repr((messages, parts))
    return TurnRequest(tuple(messages), digest=said, num_bytes=len(said), **fields)


@dataclass
class Served:
    """What the policy was asked, and what it answered."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass
class BabblingPolicy:
    """Says ``speeches`` in turn, in pieces where less is asked for, then anything; a new version now and then."""

    codec: HermesCodec
    rng: random.Random
    speeches: list[list[int]] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """For how many tokens, also where nothing was answered yet."""
    gate: asyncio.Event | None = None
    """Nothing is answered before it is set."""
    silent_after: int | None = None
    """It answers so often, and is then waited for."""
    most: int = 6
    """Tokens of a piece that is made up."""
    version: int = 0
    num_sampled: int = 0
    _rest: dict[bytes, list[int]] = field(default_factory=dict)

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
        prompt = list(input_ids)
        self.asked.append(max_new_tokens)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.silent_after is not None and len(self.served) >= self.silent_after:
            await asyncio.Event().wait()
        ids = self._ids(prompt, max_new_tokens)
        logprobs = [-float(self.num_sampled + number + 1) / 2**20 for number in range(len(ids))]
        self.num_sampled += len(ids)
        cut = self.rng.randint(0, len(ids))
        spans = [(self.version, 0, cut), (self.version + 1, cut, len(ids))]
        self.version += cut < len(ids)
        self.served.append(Served(prompt, ids, logprobs))
        return answer_of(ids, logprobs, spans, "engine-0")

    def _ids(self, prompt: list[int], most: int) -> list[int]:
        rest = self._rest.pop(_name(prompt), None)
        if rest is None and self.speeches:
            rest = self.speeches.pop(0)
        if rest is None:
            return self._babble(most)
        if len(rest) > most:
            self._rest[_name([*prompt, *rest[:most]])] = rest[most:]
        return rest[:most]

    def _babble(self, most: int) -> list[int]:
        """Bytes that are rarely text, calls among them, and now and then the end of the turn."""
        tokenizer, rng = self.codec.tokenizer, self.rng
        ids = [rng.randrange(256) for _ in range(rng.randint(1, max(1, min(self.most, most))))]
        if rng.random() < 0.3:
            body = tokenizer.encode('{"name": "add", "arguments": {"amount": 1}}')
            marks = [tokenizer.token_id(mark) for mark in ("<tool_call>", "</tool_call>")]
            ids = [marks[0] or 0, *body, marks[1] or 0][:most]
        return [*ids, self.codec.stop_ids[0]][:most] if rng.random() < 0.6 else ids


def _name(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def added(held: Snapshot | None, kept: Kept) -> Snapshot:
    """What is kept with this."""
    if held is None or not kept.is_part:
        return kept.snapshot
    return replace(kept.snapshot, data=held.data, parts=(*held.parts, kept.snapshot.data))


class HeldRecords:
    """The part of the queue that one episode needs, with its checks, in memory."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.snapshot: Snapshot | None = None
        self.num_kept_bytes = 0
        """That it was given, beside segments."""
        self.token = "token"
        self.attempt = 0
        self.calls: list[list[str]] = []
        """What each call stored."""
        self.stored: list[Sequence[Append | Kept]] = []
        self.calls_left: int | None = None
        """After so many writes the process is dead."""

    def _check(self, token: str, attempt: int) -> None:
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise Fenced("dead")
            self.calls_left -= 1
        if (token, attempt) != (self.token, self.attempt):
            raise Fenced("not yours")

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        """All of it or nothing."""
        await asyncio.sleep(0)
        payloads, snapshot = list(self.payloads), self.snapshot
        for item in appends:
            self._check(token, item.snapshot.attempt if isinstance(item, Kept) else item.attempt)
            index = item.snapshot.num_segments if isinstance(item, Kept) else item.index
            if index != len(payloads):
                raise Gap(f"{index} after {len(payloads)}")
            if isinstance(item, Kept):
                self.num_kept_bytes += len(item.snapshot.data)
                snapshot = added(snapshot, item)
            else:
                payloads.append(item.payload)
        self.payloads, self.snapshot = payloads, snapshot
        self.stored.append(appends)
        self.calls.append(["turns" if isinstance(item, Kept) else "segment" for item in appends])

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        raise NotImplementedError("an agent's episode is kept with its segments")

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        return self.snapshot

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        return self.payloads

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None:
        self._check(token, attempt - 1)
        self.attempt, self.payloads, self.snapshot = attempt, [], None

    def segments(self) -> list[Segment]:
        return [decode(payload) for payload in self.payloads]


def quick_setting(
    records: Any, codec: HermesCodec, policy: Any, token: str = "token", **changes: Any
) -> EpisodeSetting:
    counters = Counters()
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.002))
    given: dict[str, Any] = {
        "driver": None,
        "codec": codec,
        "policy": policy,
        "outbox": Outbox(records, JOB, token, retrier),
        "records": records,
        "token": token,
        "retrier": retrier,
        "counters": counters,
        "clock": time.monotonic,
        "leaving": asyncio.Event(),
    }
    return EpisodeSetting(**(given | changes))


def quick_order(**changes: Any) -> EpisodeSpec:
    lease = changes.pop("lease", LeasedEpisode(EpisodeKey(JOB, 0, 0), 0, 0, Split.TRAIN, 0, 0, 1, reads=NEWEST_SCHEMA))
    limits = {"max_turns": 1000, "max_tool_calls": 1000, "max_episode_tokens": 100_000, "max_context_tokens": 4096}
    limits |= changes.pop("limits", {})
    context_tokens = changes.pop("context_tokens", None)
    order = make_order(lease, world(), limits=limits, **changes)
    return order if context_tokens is None else replace(order, max_context_tokens=context_tokens)


class Bench:
    """One attempt of one episode, played by hand."""

    def __init__(self, codec: HermesCodec, records: Any = None, policy: Any = None, **order: Any) -> None:
        self.codec = codec
        self.speech = Speech(codec)
        self.records = records or HeldRecords()
        self.policy = policy or BabblingPolicy(codec, random.Random(0))
        self.setting = quick_setting(self.records, codec, self.policy)
        self.order = quick_order(**order)
        self.tree = TokenTree(self.order.key, 0, self.order.temperature)
        meter = Meter(Timings(), self.setting.counters, self.setting.clock)
        self.episode = AgentEpisode(self.setting, self.order, self.tree, meter, lambda: 1_700_000_000.0)

    @property
    def counters(self) -> Mapping[str, float]:
        return self.setting.counters.snapshot()

    async def ask(self, *messages: Message, **fields: Any) -> Answer:
        """Asks, and takes the whole answer."""
        return await take(await self.episode.ask(request(*messages, **fields)))


async def take(delivery: Delivery) -> Answer:
    answer = await read(delivery)
    await delivery.delivered()
    return answer


async def read(delivery: Delivery) -> Answer:
    """Without saying that the client has it."""
    text = reasoning = ""
    async for item in delivery:
        if isinstance(item, Answer):
            assert item.text.startswith(text)
            assert item.reasoning.startswith(reasoning)
            return item
        text, reasoning = text + item.text, reasoning + item.reasoning
    raise AssertionError("an answer has an end")


def judge(record: Sequence[Segment], served: Sequence[Served]) -> None:
    """Each sampled token is an action once, behind exactly the ids that the policy was given."""
    by_logprob = {logprob: (one, place) for one in served for place, logprob in enumerate(one.logprobs)}
    branches: dict[int, list[int]] = {}
    seen: set[float] = set()
    for index, segment in enumerate(record):
        assert segment.index == index
        ids = branches.setdefault(segment.branch, [])
        triples = zip(
            segment.token_ids.tolist(), segment.action_mask.tolist(), segment.behavior_logprobs.tolist(), strict=True
        )
        for token, is_action, logprob in triples:
            if is_action:
                one, place = by_logprob[logprob]
                assert logprob not in seen, "trained twice"
                seen.add(logprob)
                assert ids == [*one.prompt, *one.ids[:place]], "sampled behind other ids"
                assert token == one.ids[place]
            ids.append(token)
