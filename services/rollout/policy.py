"""What an episode needs of whoever samples for it.

Rule: an answer says of every token which version sampled it; tokens of an unknown version do not become an answer.
This module holds the shapes only: `engines` finds an engine and asks it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_core.types import CacheMode


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

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    engine_id: str
    cache_mode: CacheMode = CacheMode.FRESH
    held_s: float = 0.0
    """Time in which no engine could take the request; it does not count against the episode."""

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise InvalidAnswer(f"{len(self.output_ids)} sampled tokens with {len(self.logprobs)} log-probs")
        position = 0
        for span in self.spans:
            if span.start != position or span.end < span.start:
                raise InvalidAnswer(f"version spans leave a gap or overlap at token {position}: {list(self.spans)}")
            position = span.end
        if position != len(self.output_ids):
            raise InvalidAnswer(f"version spans cover {position} of {len(self.output_ids)} sampled tokens")


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
