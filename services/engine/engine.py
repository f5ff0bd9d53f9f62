"""The asynchronous face of the engine: generate, pause and weight loading around the synchronous scheduler.

Rule: one event loop runs both the steps and the callers, which run between two steps. With the single thread of a small
engine this is faster than a worker thread that competes for the interpreter, and it needs no lock. New weights are read
and checked in a thread beside the steps; only the switch happens between two of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from services.engine.adapters import AdapterReader
from services.engine.checkpoint import CheckpointRejected, read_checkpoint
from services.engine.deltas import follow
from services.engine.model import Decoder
from services.engine.scheduler import GenerateRequest, PauseMode, Scheduler
from services.files.weight_deltas import DeltaRefused

# One turn of the loop reads a request, the next one starts its handler: between two steps both can happen.
_LOOP_TURNS = 2
_POLL_S = 0.005


class CacheNotFlushed(Exception):
    """The new weights are in place, but running requests use the old cache, which was not flushed."""


class EmbeddedEngine:
    def __init__(self, decoder: Decoder, scheduler: Scheduler, model_dir: Path) -> None:
        self.decoder = decoder
        self.scheduler = scheduler
        self.model_dir = model_dir
        """The source of the weights that ``label`` names."""
        self.label = scheduler.label
        """The label for callers; differs from the scheduler's only after ``CacheNotFlushed``."""
        self.num_loads = 0
        """How often the weights were replaced."""
        self._digest = -1, ""
        """The number of loads, and the digest of the weights after them."""
        self._adapters = AdapterReader()
        self._wake = asyncio.Event()
        self._update = asyncio.Lock()

    async def run(self) -> None:
        """Steps while there is work. An error is a bug or a lack of memory: the process must end."""
        while True:
            if not self.scheduler.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.scheduler.step()
            await self.between_steps()

    async def between_steps(self) -> None:
        """The turn of all callers: here, and nowhere else, they are heard while something runs."""
        for _ in range(_LOOP_TURNS):
            await asyncio.sleep(0)

    async def generate(self, request: GenerateRequest) -> None:
        """Returns when the request has ended. Cancelling aborts it."""
        self.scheduler.submit(request)
        self._wake.set()
        try:
            await request.done
        finally:
            if request.finish is None:
                self.scheduler.abort(request.rid)

    async def score(self, ids: list[int]) -> tuple[list[float], str]:
        """Log-probs of ``ids`` and the label of the weights that they are of. Waits while paused, as sampling does."""
        await self._until(lambda: self.scheduler.paused is None, None)
        return self.scheduler.score(ids), self.scheduler.label

    def abort(self, rid: str) -> None:
        self.scheduler.abort(rid)

    def abort_all(self) -> None:
        self.scheduler.abort_all()

    def pause(self, mode: PauseMode) -> None:
        self.scheduler.pause(mode)

    def resume(self) -> None:
        self.scheduler.resume()
        self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Forgets all prefixes as soon as nothing runs; False when that did not happen in time."""
        await self._until(lambda: not self.scheduler.running, timeout_s)
        return self.scheduler.flush()

    async def update_weights(self, directory: Path, label: str | None, *, flush_cache: bool) -> None:
        """Replaces the weights. ``CheckpointRejected``: nothing happened. Unless paused, waits for running requests."""
        async with self._update:
            shapes = {name: tensor.shape for name, tensor in self.decoder.parameters.items()}
            tensors = await asyncio.to_thread(read_checkpoint, directory, shapes, self.decoder.tied)
            await self._switch(tensors, self.scheduler.label if label is None else label, flush_cache)
            self.model_dir = directory

    async def take_adapter(self, directory: Path, label: str, *, flush_cache: bool) -> None:
        """Replaces the weights by the base with additions. ``CheckpointRejected``: nothing happened."""
        async with self._update:
            shapes = {name: tensor.shape for name, tensor in self.decoder.parameters.items()}
            tensors = await asyncio.to_thread(self._adapters.read, directory, label, shapes, self.decoder.tied)
            await self._switch(tensors, label, flush_cache)
            self.model_dir = directory

    async def follow_deltas(self, directories: Sequence[Path], base: str, label: str, *, flush_cache: bool) -> None:
        """Applies the deltas to ``base``, which it must hold. ``DeltaRefused``: nothing happened."""
        async with self._update:
            if self.label != base:
                raise DeltaRefused(f"the deltas build on {base}, and {self.label} is held")
            num_loads, digest = self._digest
            known = digest if num_loads == self.num_loads else None
            reached = await asyncio.to_thread(follow, self.decoder.parameters, base, directories, known_digest=known)
            if reached.label != label:
                raise DeltaRefused(f"the deltas lead to {reached.label}, not to {label}")
            await self._switch(reached.tensors, label, flush_cache)
            self._digest = self.num_loads, reached.digest
            self.model_dir = directories[-1]

    async def take_weights(
        self, tensors: Mapping[str, Tensor], label: str, *, flush_cache: bool, unless_after: int
    ) -> bool:
        """Replaces these tensors, which fit. False, without effect, unless ``num_loads == unless_after``."""
        async with self._update:
            if self.num_loads != unless_after:
                return False
            await self._switch(tensors, label, flush_cache)
            return True

    async def _switch(self, tensors: Mapping[str, Tensor], label: str, flush_cache: bool) -> None:
        try:
            self.scheduler.admitting = False
            await self._until(lambda: not self.scheduler.running or self.scheduler.paused is not None, None)
            self.scheduler.load_weights(tensors, label)
            self.num_loads += 1
        finally:
            self.scheduler.admitting = True
            self._wake.set()
        if flush_cache and not self.scheduler.flush():
            raise CacheNotFlushed
        self.label = self.scheduler.label

    def relabel(self, label: str) -> None:
        self.scheduler.relabel(label)
        self.label = label

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # The steps in between are the event; they are not worth a signal each.
        while not condition() and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(_POLL_S)


__all__ = ["CacheNotFlushed", "CheckpointRejected", "EmbeddedEngine"]
