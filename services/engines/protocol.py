"""An engine, as the rest of the system depends on it: it samples, scores, takes weights, and reports its state.

Rule: token ids and log-probs are exact, and every sampled token names the weights that sampled it; an answer that
breaks this is refused when it is built. The type of an error tells a caller what to do next, its text is for people;
every kind of engine raises these errors and nothing else, whatever words its server uses. Callers know only these
types; servers, paths and versions stay with the kinds. Nothing here retries, routes, or decides when weights change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec

PauseMode = Literal["abort", "retract", "in_place"]
FinishReason = Literal["stop", "length", "abort"]


class EngineError(Exception):
    """A call to an engine failed."""


class EngineUnavailable(EngineError):
    """No usable answer: unreachable, connection lost, busy, or a server error. Retry, perhaps elsewhere."""


class EngineKeyRefused(EngineUnavailable):
    """The engine asks for another key and did nothing. The text says which setting names it."""


class EngineRejected(EngineError):
    """The engine refused this call and is unchanged. It will refuse the same call again."""


class ContextFull(EngineRejected):
    """The sequence is as long as any that the engine samples, by its own account; nothing was sent."""


class EngineProtocolError(EngineError):
    """The answer breaks the protocol; its tokens must not be used."""


class EngineDirty(EngineError):
    """The engine may hold any weights. Only a full, verified load clears this."""


class NoSuchKind(EngineError):
    """The address names a kind of engine that this release does not know."""


class LabelledSpan(msgspec.Struct, frozen=True):
    """``output_ids[start:end]`` were sampled under the weights that the engine calls ``label``."""

    label: str = msgspec.field(name="version")
    """Read under the name that all servers give it."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled tokens of one request. ``logprobs`` are those of softmax(logits / temperature) in float32."""

    output_ids: list[int]
    logprobs: list[float]
    spans: tuple[LabelledSpan, ...]
    """Tile ``output_ids`` in order, without gap or overlap."""
    finish_reason: FinishReason = "stop"
    cached_tokens: int = 0
    num_retractions: int = 0
    rid: str = ""

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise EngineProtocolError(f"{len(self.output_ids)} sampled tokens with {len(self.logprobs)} log-probs")
        position = 0
        for span in self.spans:
            if span.start != position or span.end < span.start:
                raise EngineProtocolError(f"version spans leave a gap or overlap at token {position}: {self.spans}")
            position = span.end
        if position != len(self.output_ids):
            raise EngineProtocolError(f"version spans cover {position} of {len(self.output_ids)} sampled tokens")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of all requests of an engine, from any caller. A paused engine may answer with an old one."""

    num_running: int
    num_waiting: int
    num_held_tokens: int
    """Tokens whose keys and values it holds for requests."""
    age_s: float
    """Age of the snapshot; 0 where the engine does not date it."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's report about itself."""

    label: str
    """Its name for its weights; empty if they have none."""
    model_path: str | None = None
    """The folder that it was started with, seen from the engine."""
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of the software behind an address."""

    software: str
    """Name and version, for people."""
    names_versions: bool
    """Whether answers name the weights that sampled each token. Training needs it."""
    advice: str = ""
    """What to run instead if something is missing."""
    group_problem: str = ""
    """Why tensors cannot be sent to it through a process group; empty if they can."""
    num_ranks: int = 1
    """Members that it is in such a group: one behind the other, and each is sent everything."""
    takes_deltas: bool = False
    takes_adapters: bool = False
    """Whether it merges published low-rank additions into their base by itself."""
    is_unguarded: bool = False
    """Whether it takes control calls without a key at an address that other machines may reach."""
    gpu: str | None = None
    """Which one it computes on, by its UUID; empty: none. None where it does not say."""
    quantization: str = ""
    """The method by which it quantises its weights; empty where it says that it does not, or nothing."""
    context_tokens: int = 0
    """The longest sequence that it samples, ids read and sampled together; 0 where it does not say."""


class Sampling(Protocol):
    """Tokens and log-probs. Calls may overlap freely."""

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        rid: str | None = None,
        extra_key: str | None = None,
        sampling_seed: int | None = None,
        vocab_size: int | None = None,
    ) -> Generation:
        """Samples until a stop token (kept in the output), ``max_new_tokens``, or an abort (partial output).

        ``rid`` must be fresh and is chosen when left out. ``extra_key`` names a space of the prefix cache. Cancelling
        the call aborts the request in the engine.

        ``sampling_seed``, in [0, 2**31): the number behind a token is a function of it and of the token's place behind
        all ids before it, so pieces of an answer that are asked for with one seed draw no number twice. What an engine
        makes of that is its kind's: some draw the same whatever the pieces, some where the pieces are the same, and
        some pass it over.

        ``vocab_size``: of the model behind, which may be another one for each call. EngineRejected: an input id lies
        outside, and nothing was sent. EngineProtocolError: a sampled one does.
        """

    async def score(self, input_ids: Sequence[int]) -> tuple[list[float], str]:
        """The log-prob of each id but the first at temperature 1, and the label of the weights that they are of."""

    async def abort(self, rid: str) -> None:
        """Ends the request ``rid``; its own generate call returns the tokens sampled so far."""


class WeightLoading(Protocol):
    """New weights: pause, load (from a folder, or block by block through a process group), resume."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        """``retract`` drops keys and values, ``in_place`` keeps them, ``abort`` ends the requests."""

    async def resume(self) -> None:
        """Requests kept by a pause continue under the weights that the engine holds now."""

    async def load_weights(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        """Loads the weights in ``path`` (seen from the engine) and verifies that it now calls them ``label``.

        ``flush_cache`` must be False after an ``in_place`` pause. EngineRejected, EngineUnavailable: the old weights
        serve on. EngineDirty: unknown weights.
        """

    async def load_deltas(
        self, paths: Sequence[Path], label: str, *, base: str, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Goes from ``base`` along the deltas of these versions to ``label``, and verifies that it calls them that.

        Only for an engine that ``takes_deltas``. EngineDirty: it holds something else than ``base``, or a delta is
        missing, doubled or damaged.
        """

    async def load_adapter(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        """Loads the additions in ``path`` over the base that they name, and verifies that it calls the sum ``label``.

        Only for an engine that ``takes_adapters``; fails as ``load_weights`` does.
        """

    async def join_weight_group(
        self, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Returns when all members have met: let the sender join meanwhile."""

    async def begin_weight_update(self) -> None:
        """Tensors follow. Does nothing where the engine needs no such notice."""

    async def receive_weights(
        self,
        tensors: Sequence[tuple[str, str, list[int]]],
        *,
        group: str,
        label: str | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Takes (name, dtype, shape) of each tensor and returns when all of them have come: send them meanwhile, end
        to end as one block of bytes. ``label`` comes with the last block of an update, and is None before it."""

    async def end_weight_update(self) -> None:
        """No more tensors follow. EngineRejected: no update was under way."""

    async def leave_weight_group(self, name: str) -> None:
        """The group is not used again."""


class Condition(Protocol):
    """State and capabilities."""

    async def info(self) -> EngineInfo:
        """Which weights and which model it holds."""

    async def capabilities(self) -> Capabilities:
        """What its software can do."""

    async def load(self) -> EngineLoad:
        """Its load, by its own account."""

    async def until_lost(self) -> None:
        """Returns when the engine ends a connection on which nothing is asked, or when none can be made."""

    async def is_ready(self) -> bool:
        """Whether new requests would run at once. False while paused, and for an engine that cannot be reached."""


class Engine(Sampling, WeightLoading, Condition, Protocol):
    """One engine. Its calls raise ``EngineError`` by its types."""

    @property
    def url(self) -> str:
        """The address that names it everywhere."""


Connect = Callable[[str], Engine]
"""Address -> the engine there. Sends nothing. Raises NoSuchKind."""


async def info_within(engine: Condition, timeout_s: float) -> EngineInfo | None:
    """Its report about itself, or None if it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.info()
    except (EngineError, TimeoutError):
        return None


def info_calls(engines: Iterable[Engine], timeout_s: float) -> dict[str, Callable[[], Awaitable[EngineInfo | None]]]:
    """By address: a call that asks the engine for its description."""
    return {engine.url: partial(info_within, engine, timeout_s) for engine in engines}
