"""SGLang as an engine: its HTTP protocol (0.5.19 and later), with exact token ids. The embedded engine speaks it too.

Rule: a 200 is not success. Every answer is checked (ids and log-probs aligned, version spans tile the output) and an
answer that breaks a rule is refused whole, never repaired: a wrong log-prob would be trained on.
SGLang's paths, versions and refusals stay in this module; callers see the types of ``protocol``.
Nothing here retries, routes, or decides when weights change.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from services.engines import quantization
from services.engines.http_engine import (
    CONNECT_TIMEOUT_S,
    CONTROL_TIMEOUT_S,
    GENERATE_TIMEOUT,
    Body,
    HttpEngine,
    tokens_problem,
)
from services.engines.keys import KeyPair, is_routable
from services.engines.protocol import (
    Capabilities,
    EngineDirty,
    EngineError,
    EngineInfo,
    EngineKeyRefused,
    EngineLoad,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    FinishReason,
    Generation,
    LabelledSpan,
    PauseMode,
)
from services.engines.sglang_versions import FLATTENED, EngineProfile, group_problem, num_ranks

_REPAIR_TIMEOUT_S = 10.0
# SGLang's text when new weights are in place although the call failed, and when no weight was touched.
_REPLACED_BUT_FAILED = "Weights were updated"
_NOTHING_REPLACED = "Failed to get weights iterator"


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    timestamp: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]
    timestamp: datetime | None = None


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _AnswerMeta(msgspec.Struct):
    id: str
    finish_reason: _Finish
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_versions: list[LabelledSpan]
    # absent in answers to requests that never ran
    cached_tokens: int = 0
    num_retractions: int = 0


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _AnswerMeta


class _ScoredMeta(msgspec.Struct):
    id: str
    weight_version: str
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_loads = msgspec.json.Decoder(_Loads).decode
_decode_scored = msgspec.json.Decoder(_Scored).decode


class EngineClient(HttpEngine):
    """One engine. Calls may overlap freely; the connection pool belongs to the caller."""

    def __init__(self, url: str, http: httpx.AsyncClient, keys: KeyPair | None = None) -> None:
        super().__init__(url, http, keys)
        self._has_weight_sessions: bool | None = None

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

        ``rid`` must be fresh and is 32 hex digits when left out. ``extra_key`` names a space of the prefix cache.
        ``vocab_size`` is that of the model behind: an id outside, which can crash an engine, is never sent, and refused
        in an answer.
        Cancelling the call aborts the request in the engine.
        """
        rid = rid or os.urandom(16).hex()
        body: Body = {
            "rid": rid,
            "input_ids": self._checked_input(input_ids, max_new_tokens, vocab_size),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            "extra_key": extra_key,
            "sampling_params": _sampling_params(max_new_tokens, temperature, tuple(stop_token_ids), sampling_seed),
        }
        try:
            response = await self._call("POST", "/generate", body, timeout=GENERATE_TIMEOUT)
        except (asyncio.CancelledError, EngineUnavailable):
            await self._abort_unawaited(rid)
            raise
        return self._read_generation(response.content, rid, max_new_tokens, vocab_size)

    async def score(self, input_ids: Sequence[int]) -> tuple[list[float], str]:
        """The log-prob of each id but the first at temperature 1, and the label of the weights that they are of."""
        body: Body = {
            "rid": os.urandom(16).hex(),
            "input_ids": self._checked_input(input_ids, 1),
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        response = await self._call("POST", "/generate", body, timeout=GENERATE_TIMEOUT)
        try:
            meta = _decode_scored(response.content).meta_info
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.url}: not an answer to a scoring request: {error}") from error
        logprobs = [logprob for logprob, _, _ in meta.input_token_logprobs[1:] if logprob is not None]
        if [entry[1] for entry in meta.input_token_logprobs] != list(input_ids) or len(logprobs) + 1 != len(input_ids):
            raise EngineProtocolError(f"{self.url}: scored different ids than it was given")
        return logprobs, meta.weight_version

    async def abort(self, rid: str) -> None:
        """Ends the request ``rid``; its own generate call returns the tokens sampled so far."""
        await self._call("POST", "/abort_request", {"rid": rid}, admin=True)

    async def pause(self, mode: PauseMode = "retract") -> None:
        await self._call("POST", "/pause_generation", {"mode": mode}, admin=True)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, admin=True)

    async def flush_cache(self, *, timeout_s: float = 0.0) -> None:
        await self._call(
            "POST",
            f"/flush_cache?timeout={timeout_s}",
            admin=True,
            timeout=httpx.Timeout(CONTROL_TIMEOUT_S + timeout_s, connect=CONNECT_TIMEOUT_S),
        )

    async def load_weights(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        """Loads the weights in ``path`` (seen from the engine) and verifies that it now calls them ``label``.

        Pause first, else the engine lets its running requests end. ``flush_cache`` must be False after an ``in_place``
        pause. EngineRejected: the old weights serve on. EngineDirty: unknown weights.
        """
        body: Body = {"model_path": str(path), "weight_version": label, "flush_cache": flush_cache}
        await self._load("/update_weights_from_disk", body, label, timeout_s)

    async def load_deltas(
        self, paths: Sequence[Path], label: str, *, base: str, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """A path of the embedded engine only. A refusal shows that it does not hold what it was believed to hold."""
        body: Body = {
            "paths": [str(path) for path in paths],
            "base_version": base,
            "weight_version": label,
            "flush_cache": flush_cache,
        }
        await self._load("/update_weights_from_deltas", body, label, timeout_s, may_refuse=False)

    async def load_adapter(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        """A path of the embedded engine only."""
        body: Body = {"path": str(path), "weight_version": label, "flush_cache": flush_cache}
        await self._load("/update_weights_from_adapter", body, label, timeout_s)

    async def _load(self, path: str, body: Body, label: str, timeout_s: float, *, may_refuse: bool = True) -> None:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            await self._call("POST", path, body, admin=True, timeout=timeout)
        except EngineRejected as refusal:
            if may_refuse and _NOTHING_REPLACED in str(refusal):
                raise
            if _REPLACED_BUT_FAILED not in str(refusal):
                raise EngineDirty(f"{self.url}: a weight load failed: {refusal}") from refusal
            await self._finish_replaced(label)
        except EngineUnavailable as lost:
            if isinstance(lost, EngineKeyRefused) or isinstance(lost.__cause__, httpx.ConnectError):
                raise
            raise EngineDirty(f"{self.url}: no answer to a weight load: {lost}") from lost
        try:
            held = (await self.info()).label
        except EngineError as unsaid:
            raise EngineDirty(f"{self.url}: does not say what it holds after a load of {label!r}: {unsaid}") from unsaid
        if held != label:
            raise EngineDirty(f"{self.url}: holds weights {held!r} after a load of {label!r}")

    async def begin_weight_update(self) -> None:
        if await self._asks_for_sessions():
            await self._call("POST", "/begin_weight_update", {}, admin=True)

    async def end_weight_update(self) -> None:
        if await self._asks_for_sessions():
            await self._call("POST", "/end_weight_update", {}, admin=True)

    async def join_weight_group(
        self, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Returns when all members have met: let the sender join meanwhile."""
        body: Body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        await self._call("POST", "/init_weights_update_group", body, admin=True, timeout=timeout)

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
        names, dtypes, shapes = zip(*tensors, strict=True)
        body: Body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": label,
            "flush_cache": flush_cache,
            "load_format": FLATTENED,
        }
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        await self._call("POST", "/update_weights_from_distributed", body, admin=True, timeout=timeout)

    async def leave_weight_group(self, name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name}, admin=True)

    async def info(self) -> EngineInfo:
        found = await self.model_info()
        architectures = found.get("architectures")
        return EngineInfo(
            label=_text_or_none(found.get("weight_version")) or "",
            model_path=_text_or_none(found.get("model_path")),
            model_type=_text_or_none(found.get("model_type")),
            architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else None,
        )

    async def model_info(self) -> dict[str, Any]:
        return await self._json("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Holds the engine's keys on a real SGLang: never log or forward it."""
        return await self._json("/server_info")

    async def profile(self) -> EngineProfile:
        return EngineProfile.parse(str((await self.server_info()).get("version")))

    async def capabilities(self) -> Capabilities:
        said = await self.server_info()
        profile = EngineProfile.parse(str(said.get("version")))
        self._has_weight_sessions = profile.has_weight_sessions  # the version at this address may have changed
        return Capabilities(
            f"SGLang {profile}",
            profile.names_versions,
            advice="0.5.19 and later do",
            group_problem=group_problem(said),
            num_ranks=num_ranks(said),
            takes_deltas=said.get("weight_deltas") == 1,
            takes_adapters=said.get("weight_adapters") == 1,
            gpu="" if said.get("device") == "cpu" else _text_or_none(said.get("gpu_uuid")),
            quantization=quantization.named(said.get("quantization")),
            context_tokens=_longest_sequence(said),
            is_unguarded=is_routable(self.url) and await self._takes_control_without_key(),
        )

    async def _takes_control_without_key(self) -> bool:
        nothing: Body = {"rid": os.urandom(16).hex()}
        answer = await self._send("POST", "/abort_request", nothing, admin=True, shows_key=False)
        return answer.status_code == 200

    async def _asks_for_sessions(self) -> bool:
        if self._has_weight_sessions is None:
            self._has_weight_sessions = (await self.profile()).has_weight_sessions
        return self._has_weight_sessions

    async def loads(self) -> dict[str, Any]:
        return await self._json("/v1/loads")

    async def load(self) -> EngineLoad:
        """Its load, by its own account."""
        response = await self._call("GET", "/v1/loads")
        try:
            answer = _decode_loads(response.content)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.url}/v1/loads: {error}") from error
        now = answer.timestamp.timestamp() if answer.timestamp else 0.0
        taken = min((now if one.timestamp is None else one.timestamp for one in answer.loads), default=now)
        return EngineLoad(
            num_running=sum(one.num_running_reqs for one in answer.loads),
            num_waiting=sum(one.num_waiting_reqs for one in answer.loads),
            num_held_tokens=sum(one.num_used_tokens for one in answer.loads),
            age_s=max(0.0, now - taken),
        )

    async def is_ready(self) -> bool:
        """Whether new requests would run at once. False while paused, and for an engine that cannot be reached."""
        try:
            response = await self._send("GET", "/ready")
            if response.status_code == 404:  # SGLang before 0.5.20
                response = await self._send("GET", "/model_info")
        except EngineUnavailable:
            return False
        return response.status_code == 200

    async def _finish_replaced(self, label: str) -> None:
        """The new weights are in place, but the cache and the label are old: repair both."""
        try:
            await self.flush_cache(timeout_s=_REPAIR_TIMEOUT_S)
            new_label: Body = {"new_version": label, "abort_all_requests": False}
            await self._call("POST", "/update_weight_version", new_label, admin=True)
        except EngineError as error:
            raise EngineDirty(f"{self.url}: it has new weights but an old cache or label: {error}") from error

    def _read_generation(self, content: bytes, rid: str, max_new_tokens: int, vocab_size: int | None) -> Generation:
        try:
            answer = _decode_answer(content)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.url}: not an answer of SGLang >= 0.5.19: {error}") from error
        meta, output_ids = answer.meta_info, answer.output_ids
        logprobs = [entry[0] for entry in meta.output_token_logprobs]
        broken = (
            (meta.id != rid and f"rid {meta.id!r} instead of {rid!r}")
            or (meta.completion_tokens != len(output_ids) and f"completion_tokens {meta.completion_tokens}")
            or ([entry[1] for entry in meta.output_token_logprobs] != output_ids and "log-probs of different ids")
            or tokens_problem(output_ids, logprobs, max_new_tokens, vocab_size)
        )
        if broken:
            raise EngineProtocolError(f"{self.url}: answer of {len(output_ids)} tokens with {broken}")
        finish_reason = self._read_finish(meta.finish_reason)
        try:
            return Generation(
                output_ids=output_ids,
                logprobs=logprobs,
                spans=tuple(one for one in meta.weight_versions if one.end != one.start),
                finish_reason=finish_reason,
                cached_tokens=meta.cached_tokens,
                num_retractions=meta.num_retractions,
                rid=rid,
            )
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{self.url}: {error}") from error

    def _read_finish(self, finish: _Finish) -> FinishReason:
        match finish.type:
            case "stop" | "length" | "abort":
                return finish.type
        raise EngineProtocolError(f"{self.url}: unknown finish reason {finish.type!r}")


@functools.lru_cache(maxsize=256)
def _sampling_params(
    max_new_tokens: int, temperature: float, stop_token_ids: tuple[int, ...], sampling_seed: int | None
) -> msgspec.Raw:
    """As JSON. Every key that shapes the distribution is set, so that no default of a model or a server can bend it."""
    params: dict[str, float | bool | list[int]] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": False,  # True would switch stop_token_ids off as well
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling_seed is not None:
        params["sampling_seed"] = sampling_seed
    return msgspec.Raw(msgspec.json.encode(params))


def _longest_sequence(said: Mapping[str, Any]) -> int:
    """It refuses ``max_req_input_len`` ids and more, a few less than its context: what grows to that is over."""
    limits = [said.get(name) for name in ("context_length", "max_req_input_len")]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=0)


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
