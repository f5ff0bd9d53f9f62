"""The policy as an episode sees it: something that samples, and names the version of every token.

Rule: tokens of an unknown version never become an answer. What an engine calls its weights becomes a version of the job
where its answer is checked, and nothing behind that knows labels. This module holds the types only;
`services.workers.engines` finds an engine and asks it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_core.types import CacheMode
from services.engines.protocol import Generation


class Drained(Exception):
    """The worker is leaving: the episode stops where it is, durable, and is handed back."""


class Interrupted(Exception):
    """The episode has had its share while others wait: it is resumed later from its durable segments."""


class InvalidAnswer(Exception):
    """An engine's answer breaks the contract: it is counted, discarded and asked for again, never repaired."""


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens from ``start`` to ``end`` come from ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine answered and was checked."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[Span, ...]
    """Tile ``ids`` in order, without gap or overlap."""
    engine_id: str
    cache_mode: CacheMode = CacheMode.FRESH
    held_s: float = 0.0
    """How long no engine could take the request; it does not count against the episode."""

    @classmethod
    def of(cls, generation: Generation, versions: Sequence[int], engine_id: str, **rest: Any) -> Sampled:
        """``versions``: of the generation's spans, in their order."""
        named = zip(generation.spans, versions, strict=True)
        spans = tuple(Span(one.start, one.end, version) for one, version in named)
        return cls(generation.output_ids, generation.logprobs, spans, engine_id, **rest)


class Policy(Protocol):
    """Samples for the episodes of one job."""

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
        """At least one token. Waits until an engine can answer; raises ``Drained`` if the worker leaves meanwhile.

        ``prefer_engine`` has this history in its prefix cache. ``sampling_seed`` is the engine's
        (`services.engines.protocol`); given again with the rest of a piece, the answer goes on as it was begun.

        The answer may be shorter than asked for without ending in a stop token: the caller asks for the rest.
        ContextFull: there is none, since no engine samples longer sequences.
        """
        ...
