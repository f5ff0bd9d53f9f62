"""The order of work: requests join and leave at any step, weights change between two steps, nothing is lost.

Rule: a token keeps the log-prob and the label it was sampled with, whatever happens to its request afterwards. A
retracted request gives up its keys and values, never its tokens; it is computed anew under the weights that serve when
it returns. Everything here is synchronous and runs between two yields of one event loop: there are no locks, and no
caller sees half a step. It knows neither HTTP nor files.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Required, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.model import Batch, Decoder, Prefill
from services.engine.prefix_cache import CachedPrefix, PrefixCache
from services.engine.sampling import sample, uniforms

PauseMode = Literal["abort", "retract", "in_place"]

# Prompt tokens computed in one step, next to the decoding requests. No request is answered during a step, so it should
# not take longer than some tens of milliseconds; more tokens at a time were not faster on a CPU (measured 512 to 4096).
_MAX_PREFILL_TOKENS = {"cpu": 1024}
_MAX_PREFILL_TOKENS_ELSEWHERE = 8192
# A request waits one step if another one, computed in this step, will leave it that many more tokens to copy.
_WORTH_WAITING = 16

_ROW = np.dtype(
    [
        ("num_cached", np.int64),  # tokens whose keys and values are in the row
        ("last_id", np.int64),
        ("place", np.uint64),  # ids before the token to come
        ("seed", np.uint64),
        ("temperature", np.float32),
    ]
)


class DuplicateRequest(Exception):
    """A request of this id is still in the engine."""


class RequestFailed(Exception):
    """The engine could not sample for this request."""


class Finish(TypedDict, total=False):
    """Why a request ended, as in the protocol; each type has fields of its own."""

    type: Required[Literal["stop", "length", "abort"]]
    matched: int
    length: int
    message: str
    status_code: None
    err_type: None


class SchedulerLoad(TypedDict):
    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_running_requests: int
    utilization: float


@dataclass(slots=True, eq=False)
class GenerateRequest:
    rid: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    stop_token_ids: frozenset[int]
    seed: int
    cache_space: str | None
    done: asyncio.Future[None]
    arrived_s: float = field(default_factory=time.perf_counter)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(label, index of the first token that was sampled under it)"""
    cached_tokens: int | None = None
    """None until it first ran."""
    num_retractions: int = 0
    finish: Finish | None = None
    entry: CachedPrefix | None = None
    """None when its keys and values stem from several versions: no other request may use them."""

    def mark(self, label: str) -> None:
        if not self.marks or self.marks[-1][0] != label:
            self.marks.append((label, len(self.output_ids)))

    def spans(self) -> list[tuple[str, int, int]]:
        """(label, start, end): tile the output; one empty span when there is none."""
        ends = [start for _, start in self.marks[1:]] + [len(self.output_ids)]
        spans = [(label, start, end) for (label, start), end in zip(self.marks, ends, strict=True)]
        return [span for span in spans if span[2] > span[1]] or [(self.marks[-1][0], 0, 0)]


class Scheduler:
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_concurrency: int,
        prefix_cache_bytes: int,
        kv_cache_bytes: int | None = None,
        label: str = "default",
    ) -> None:
        """``kv_cache_bytes``: of what running requests hold, at most, where more than one runs; None: no limit."""
        self.label = label
        """The name of the weights that sample now."""
        self.paused: PauseMode | None = None
        self.admitting = True
        """False while an update waits for the running requests to end."""
        self.running: list[GenerateRequest] = []
        """In the order of their rows."""
        self.waiting: deque[GenerateRequest] = deque()
        self.num_generated = 0
        self.num_prefilled = 0
        self._decoder = decoder
        self._max_concurrency = max_concurrency
        self._kv_cache_bytes = kv_cache_bytes
        self._cache = decoder.new_cache()
        self._prefixes = PrefixCache(budget_bytes=prefix_cache_bytes)
        self._rows = np.zeros(max_concurrency, dtype=_ROW)
        self._by_rid: dict[str, GenerateRequest] = {}

    @property
    def has_work(self) -> bool:
        return self.paused is None and bool(self.running or (self.waiting and self.admitting))

    def submit(self, request: GenerateRequest) -> None:
        if request.rid in self._by_rid:
            raise DuplicateRequest(request.rid)
        self._by_rid[request.rid] = request
        self.waiting.append(request)

    def abort(self, rid: str) -> None:
        """Ends the request of exactly this id with what it has sampled; unknown ids are ignored."""
        request = self._by_rid.get(rid)
        if request is None:
            return
        if request in self.waiting:
            self.waiting.remove(request)
            request.mark(self.label)
            self._finish(request, {"type": "abort", "message": "Abort in waiting queue"})
        else:
            self._leave({self.running.index(request): _ABORTED})

    def abort_all(self) -> None:
        for rid in list(self._by_rid):
            self.abort(rid)

    def pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for request in self.running:
                self._forget(request)
                request.num_retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running.clear()

    def resume(self) -> None:
        self.paused = None

    def flush(self) -> bool:
        """Forgets all prefixes; False when requests are running."""
        if self.running:
            return False
        self._prefixes.clear()
        return True

    @torch.inference_mode()
    def load_weights(self, tensors: Mapping[str, Tensor], label: str) -> None:
        """Switches to other weights between two steps. Requests that still run keep their stale keys and values."""
        self._decoder.load(tensors)
        self.relabel(label)
        self._prefixes.clear()
        for request in self.running:
            request.entry = None

    def relabel(self, label: str) -> None:
        self.label = label
        for request in self.running:
            request.mark(label)

    @torch.inference_mode()
    def score(self, ids: list[int]) -> list[float]:
        """Log-probs of given tokens under the present weights, beside everything else and without its caches."""
        return self._decoder.score(ids)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for each running request and the first token for those that join."""
        self._make_room()
        num_decode = len(self.running)
        prefills, new_ids = self._admit() if self.admitting else ([], [])
        num = len(self.running)
        if not num:
            return
        rows = self._rows[:num]
        longest = self._longest(num_decode)
        self._cache.reserve(num, max([longest, *(prefill.end for prefill in prefills)]))
        ids_N = np.concatenate([rows["last_id"][:num_decode], *new_ids])
        positions_N = np.concatenate(
            [rows["num_cached"][:num_decode], *(np.arange(start, end) for _, start, end in prefills)]
        )
        batch = Batch(self._tensor(ids_N), self._tensor(positions_N), num_decode, longest, prefills)
        logits_B = self._decoder.forward(batch, self._cache)
        uniforms_B = self._tensor(uniforms(rows["seed"], rows["place"]))
        ids_B, logprobs_B = sample(logits_B, self._tensor(rows["temperature"].copy()), uniforms_B)
        rows["num_cached"][:num_decode] += 1
        for row, _, end in prefills:
            rows["num_cached"][row] = end
            if (entry := self.running[row].entry) is not None:
                self._prefixes.ready(entry)
        rows["last_id"] = ids_B.cpu().numpy()
        rows["place"] += np.uint64(1)
        self._record(ids_B.tolist(), logprobs_B.tolist())

    def load(self) -> SchedulerLoad:
        """A snapshot, named as in the protocol's ``/v1/loads``."""
        num_used = int(self._rows["num_cached"][: len(self.running)].sum())
        num_waiting_tokens = sum(len(request.prompt) + len(request.output_ids) for request in self.waiting)
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(self.running),
            "num_waiting_reqs": len(self.waiting),
            "num_waiting_uncached_tokens": num_waiting_tokens,
            "num_used_tokens": num_used,
            "num_total_tokens": num_used + num_waiting_tokens,
            "max_running_requests": self._max_concurrency,
            "utilization": len(self.running) / self._max_concurrency,
        }

    def _longest(self, num_decode: int) -> int:
        """Tokens of the longest running request when it has decoded one more."""
        return int(self._rows["num_cached"][:num_decode].max(initial=0)) + 1

    def _fits(self, num_rows: int, length: int) -> bool:
        """One request alone always does."""
        most_bytes = self._kv_cache_bytes
        return most_bytes is None or num_rows <= 1 or self._cache.size_bytes(num_rows, length) <= most_bytes

    def _make_room(self) -> None:
        """Retracts requests, the last row first, until one token more for each of the others fits."""
        while not self._fits(len(self.running), self._longest(len(self.running))):
            request, row = self.running[-1], len(self.running) - 1
            self._keep_prefix(request, row)
            self.running.pop()
            request.num_retractions += 1
            self.waiting.appendleft(request)

    def _admit(self) -> tuple[list[Prefill], list[NDArray[np.int64]]]:
        """Gives rows to waiting requests, as many as fit into a step, and copies what prefixes they share."""
        prefills: list[Prefill] = []
        new_ids: list[NDArray[np.int64]] = []
        room = _MAX_PREFILL_TOKENS.get(self._decoder.device.type, _MAX_PREFILL_TOKENS_ELSEWHERE)
        postponed = []
        longest = self._longest(len(self.running))
        while self.waiting and len(self.running) < self._max_concurrency:
            request = self.waiting.popleft()
            tokens = np.array(request.prompt + request.output_ids, dtype=np.int32)
            if not self._fits(len(self.running) + 1, max(longest, len(tokens))):
                postponed.append(request)
                break
            entry, num_shared, pending = self._prefixes.match(tokens, request.cache_space)
            num_new = len(tokens) - num_shared
            if pending >= num_shared + _WORTH_WAITING:
                postponed.append(request)
                continue
            if prefills and num_new > room:
                postponed.append(request)
                break
            room -= num_new
            prefills.append(Prefill(len(self.running), num_shared, len(tokens)))
            new_ids.append(tokens[num_shared:].astype(np.int64))
            longest = max(longest, len(tokens))
            self._cache.reserve(len(self.running) + 1, longest)
            self._join(request, tokens, entry, num_shared)
        self.waiting.extendleft(reversed(postponed))
        return prefills, new_ids

    def _join(
        self, request: GenerateRequest, tokens: NDArray[np.int32], entry: CachedPrefix | None, num_shared: int
    ) -> None:
        row = len(self.running)
        if entry is not None and entry.kv is not None:
            self._cache.load(row, entry.kv, num_shared)
            if num_shared == entry.length:  # the new entry contains this one
                self._prefixes.drop(entry)
        elif entry is not None:
            self._cache.move(entry.row, row, num_shared)
        request.entry = self._prefixes.start(tokens, request.cache_space, row)
        request.mark(self.label)
        if request.cached_tokens is None:
            request.cached_tokens = num_shared
        self.num_prefilled += len(tokens) - num_shared
        self._rows[row] = (0, 0, len(tokens), request.seed, request.temperature)
        self.running.append(request)

    def _record(self, ids: list[int], logprobs: list[float]) -> None:
        self.num_generated += len(ids)
        leaving: dict[int, Finish | RequestFailed] = {}
        for row, (request, token_id, logprob) in enumerate(zip(self.running, ids, logprobs, strict=True)):
            if not logprob > -float("inf"):  # also true for NaN
                leaving[row] = RequestFailed("the model computes non-finite numbers")
                continue
            request.output_ids.append(token_id)
            request.logprobs.append(logprob)
            if token_id in request.stop_token_ids:
                leaving[row] = {"type": "stop", "matched": token_id}
            elif len(request.output_ids) >= request.max_new_tokens:
                leaving[row] = {"type": "length", "length": len(request.output_ids)}
        if leaving:
            self._leave(leaving)

    @torch.inference_mode()
    def _leave(self, leaving: Mapping[int, Finish | RequestFailed]) -> None:
        """Ends the requests in these rows and closes the gaps, from the end, so that only live rows move."""
        for row in sorted(leaving, reverse=True):
            request, last = self.running[row], len(self.running) - 1
            finish = leaving[row]
            if isinstance(finish, RequestFailed):
                self._forget(request)
                self._cache.erase(row)
            else:
                self._keep_prefix(request, row)
            if row != last:
                self._cache.move(last, row, int(self._rows["num_cached"][last]))
                self._rows[row] = self._rows[last]
                self.running[row] = moved = self.running[last]
                if moved.entry is not None:
                    moved.entry.row = row
            self.running.pop()
            self._finish(request, finish)

    def _keep_prefix(self, request: GenerateRequest, row: int) -> None:
        if request.entry is None:
            return
        num_cached = int(self._rows["num_cached"][row])
        tokens = np.array((request.prompt + request.output_ids)[:num_cached], dtype=np.int32)
        self._prefixes.finish(request.entry, tokens, self._cache.save(row, num_cached))
        request.entry = None

    def _forget(self, request: GenerateRequest) -> None:
        if request.entry is not None:
            self._prefixes.drop(request.entry)
            request.entry = None

    def _finish(self, request: GenerateRequest, finish: Finish | RequestFailed) -> None:
        del self._by_rid[request.rid]
        if isinstance(finish, RequestFailed):
            if not request.done.done():
                request.done.set_exception(finish)
            return
        request.finish = finish
        if not request.done.done():
            request.done.set_result(None)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._decoder.device)


_ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
