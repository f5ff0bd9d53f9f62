"""A conversation with a model as tokens: rendered, bridged and read exactly as in training.

Rule: the ids that were sampled stay as they were; what follows is bridged onto them. Nothing is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_core.chat import ChatCodec
from gspo_core.environment_contract import Start
from gspo_core.episode_limits import limit_met
from gspo_core.evaluation.policy import PolicyTurn, PolicyUnusable
from gspo_core.messages import Message
from gspo_core.spec import EpisodeLimits
from gspo_core.types import EpisodeKey, StopReason
from services.engines.protocol import EngineError, Sampling
from services.episodes.history import Conversation
from services.episodes.metering import Counters
from services.episodes.policy import Sampled
from services.episodes.tree import Ledger

# A repetition is looked for after so many tokens, as by default in a job.
CHUNK_TOKENS = 1024
_JOB = "job_evaluation"


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """The model behind all conversations of an evaluation."""

    codec: ChatCodec
    engine: Sampling
    temperature: float
    context_tokens: int
    vocab_size: int


class TokenConversation:
    def __init__(self, sampler: TokenSampler, name: str, seed: int, limits: EpisodeLimits) -> None:
        self._sampler, self._name, self._seed, self._limits = sampler, name, seed, limits
        self._max_context_tokens = min(sampler.context_tokens, limits.max_context_tokens)
        self._ledger = Ledger(EpisodeKey(_JOB, 0, 0), 0, sampler.temperature)
        self._history = Conversation(
            sampler.codec, self._ledger, Counters(), self._max_context_tokens, limits.max_observation_chars
        )

    def begin(self, start: Start) -> StopReason | None:
        return self._history.begin(start)

    async def answer(self, max_tokens: int) -> PolicyTurn | StopReason:
        codec, sampled = self._sampler.codec, self._ledger.open.sampled
        stop = None
        while stop is None and not (sampled and sampled[-1] in codec.stop_ids):
            if (stop := self._exhausted(max_tokens)) is None:
                await self._sample_chunk(max_tokens)
        parsed = self._history.parse()
        message = codec.message(sampled, self._history.tools, turn=parsed)
        return PolicyTurn(parsed, message, len(sampled), stop)

    def read(self, turn: PolicyTurn, messages: Sequence[Message]) -> StopReason | None:
        return self._history.read(turn.parsed, messages)

    def _exhausted(self, max_tokens: int) -> StopReason | None:
        sampled = self._ledger.open.sampled
        met = limit_met(self._limits, sampled, self._ledger.num_tokens, self._max_context_tokens)
        return met or (StopReason.MAX_TOKENS if len(sampled) >= max_tokens else None)

    async def _sample_chunk(self, max_tokens: int) -> None:
        sampler, ledger = self._sampler, self._ledger
        remaining = min(max_tokens - len(ledger.open.sampled), self._max_context_tokens - ledger.num_tokens)
        try:
            generation = await sampler.engine.generate(
                ledger.prompt(),
                max_new_tokens=min(remaining, CHUNK_TOKENS),
                temperature=sampler.temperature,
                stop_token_ids=sampler.codec.stop_ids,
                sampling_seed=self._sampling_seed(),
                vocab_size=sampler.vocab_size,
            )
        except EngineError as error:
            raise PolicyUnusable(f"the engine failed: {error}") from error
        ledger.record(Sampled.of(generation, [0] * len(generation.spans), "local"))

    def _sampling_seed(self) -> int:
        place = f"{self._seed}/{self._name}/{self._ledger.num_tokens}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest(), "big") >> 1
