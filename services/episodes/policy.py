"""What an episode needs of the policy that samples for it.

Rule: an answer names for every token the version that sampled it; tokens of an unknown version do not become an answer.
That spans tile the tokens is checked once, when the ``Generation`` is built. This module holds the shapes only:
`engines` finds an engine and asks it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_core.types import CacheMode
from services.engines.protocol import Generation


class Drained(Exception):
    """The worker is leaving: the episode stops where it stands, durable, and is handed back."""


class Interrupted(Exception):
    """The episode has had its share while others wait: it goes on later, from what is durable."""


class InvalidAnswer(Exception):
    """An engine's answer breaks the contract: counted, thrown away, asked again; never repaired."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """``output_ids[start:end]`` were sampled by ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of an engine: tokens, their log-probs as sampled, and who sampled them."""

    generation: Generation
    versions: Sequence[int]
    """The version of each of the generation's spans."""
    engine_id: str
    cache_mode: CacheMode = CacheMode.FRESH
    held_s: float = 0.0
    """Time in which no engine could take the request; it does not count against the episode."""

    @property
    def output_ids(self) -> Sequence[int]:
        return self.generation.output_ids

    @property
    def logprobs(self) -> Sequence[float]:
        return self.generation.logprobs

    @property
    def spans(self) -> list[VersionSpan]:
        named = zip(self.versions, self.generation.spans, strict=True)
        return [VersionSpan(version, span.start, span.end) for version, span in named]


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
    ) -> Sampled:
        """At least one token. Waits as long as no engine can answer; raises ``Drained`` when the worker leaves then.

        ``prefer_engine`` has this history in its prefix cache.

        The answer may be shorter than asked for without ending in a stop token: the caller asks for the rest.
        """
        ...
