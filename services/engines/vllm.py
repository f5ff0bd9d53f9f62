"""vLLM as an engine: its HTTP protocol for token ids (0.32.0 and later), and its calls for training, which it calls
development mode.

Rule: as for SGLang, every answer is checked and refused whole if it breaks a promise. Weights and their label are two
calls there, so a load takes the old label away first: at no moment does the engine name weights that it does not hold.
Weights come from a folder; paths and JSON are all that is sent. Nothing here retries, routes, or decides when weights
change.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx
import msgspec

from services.engines import quantization
from services.engines.http_engine import (
    CONNECT_TIMEOUT_S,
    GENERATE_TIMEOUT,
    Body,
    HttpEngine,
    tokens_problem,
)
from services.engines.keys import is_routable
from services.engines.protocol import (
    Capabilities,
    EngineDirty,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    FinishReason,
    Generation,
    LabelledSpan,
    PauseMode,
)
from services.engines.vllm_metrics import load_in

T = TypeVar("T")

# Methods of the worker in ``inside_vllm``.
_LOAD, _GREET = "gspo_load", "gspo_greet"
_WORKER = "--worker-extension-cls gspo_vllm.WeightsFromFolder"
_GENERATE = "/inference/v1/generate"
# Its own prefix of a request's id, which its abort wants to be told.
_RID_PREFIX = "generate-tokens-"
# What it must have before a job relies on it.
_SAMPLING_PATHS = (_GENERATE, "/inference/v1/abort_requests")
_TRAINING_PATHS = (
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
    *("/collective_rpc", "/update_weight_version", "/weight_info"),
)
# 403: it is there, and switched off.
_NOT_THERE = frozenset({403, 404})
_FOLDERS_ONLY = "vLLM takes weights from a folder; its process groups are its own and were never tried here"
# Stands in its answers for what is not a number, or infinite.
_NO_LOGPROB = -9999.0
# While weights change they have no name.
_NO_LABEL = ""
_PAUSES: dict[PauseMode, str] = {
    "abort": "mode=abort&clear_cache=true",
    "retract": "mode=keep&clear_cache=true",
    "in_place": "mode=keep&clear_cache=false",
}


class _TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[LabelledSpan] | None = None
    """Absent where nothing was sampled."""


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    request_id: str
    choices: list[_Choice]
    usage: _Usage | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _PromptLogprob] | None]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Pause(msgspec.Struct):
    is_paused: bool


class _Model(msgspec.Struct):
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _ModelConfig(msgspec.Struct):
    quantization: str | None = None


class _Config(msgspec.Struct):
    model_config: _ModelConfig | None = None

    def said(self) -> str | None:
        return self.model_config.quantization if self.model_config else None


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


class _RankLoaded(msgspec.Struct):
    refused: str


class _Loaded(msgspec.Struct):
    """What ``inside_vllm/gspo_vllm.py`` answers, by rank."""

    results: list[_RankLoaded]


class _Flushed(msgspec.Struct):
    success: bool


class VllmClient(HttpEngine):
    """One engine. Calls may overlap freely; the connection pool belongs to the caller."""

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

        Requests with different ``extra_key`` share no keys and values. Cancelling the call aborts the request.
        """
        rid = rid or os.urandom(16).hex()
        body: Body = {
            "request_id": rid,
            "token_ids": self._checked_input(input_ids, max_new_tokens, vocab_size),
            "cache_salt": None if extra_key is None else _salt(extra_key),
            "stream": False,
            "sampling_params": _sampling_params(
                max_new_tokens, temperature, tuple(stop_token_ids), _seed_at(sampling_seed, len(input_ids))
            ),
        }
        try:
            response = await self._call("POST", _GENERATE, body, timeout=GENERATE_TIMEOUT)
        except (asyncio.CancelledError, EngineUnavailable):
            await self._abort_unawaited(rid)
            raise
        return self._read_generation(response.content, rid, max_new_tokens, vocab_size)

    async def score(self, input_ids: Sequence[int]) -> tuple[list[float], str]:
        """The log-prob of each id but the first at temperature 1, and the label of the weights that they are of.

        One token is sampled as well, since only sampled tokens carry a label.
        """
        body: Body = {
            "request_id": os.urandom(16).hex(),
            "token_ids": self._checked_input(input_ids, 1),
            "stream": False,
            "sampling_params": _scoring_params(),
        }
        response = await self._call("POST", _GENERATE, body, timeout=GENERATE_TIMEOUT)
        answer = self._read(response.content, _Scored)
        spans = [span for choice in answer.choices for span in choice.weight_versions or ()]
        try:
            scored = [
                found[str(token_id)].logprob
                for token_id, found in zip(input_ids[1:], answer.prompt_logprobs[1:], strict=True)
                if found is not None
            ]
        except (KeyError, ValueError) as error:
            raise EngineProtocolError(f"{self.url}: scored different ids than it was given") from error
        if len(scored) + 1 != len(input_ids) or len(spans) != 1:
            raise EngineProtocolError(
                f"{self.url}: {len(scored)} scores and {len(spans)} labels for {len(input_ids)} ids"
            )
        if min(scored, default=0.0) <= _NO_LOGPROB or tokens_problem([], scored, 1, None):
            raise EngineProtocolError(f"{self.url}: scores that are no log-probs")
        return scored, spans[0].label

    async def abort(self, rid: str) -> None:
        """Ends the request ``rid``; its own generate call returns the tokens sampled so far."""
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [_RID_PREFIX + rid]})

    async def pause(self, mode: PauseMode = "retract") -> None:
        await self._call("POST", f"/pause?{_PAUSES[mode]}", admin=True)

    async def resume(self) -> None:
        await self._call("POST", "/resume", admin=True)

    async def flush_cache(self) -> None:
        """Requests that run lose their keys and values too, and compute them anew. EngineUnavailable: not now."""
        response = await self._call("POST", "/reset_prefix_cache?reset_running_requests=true", admin=True)
        if not self._read(response.content, _Flushed).success:
            raise EngineUnavailable(f"{self.url}: its cache is in use and cannot be flushed")

    async def load_weights(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        """Loads the weights in ``path`` (seen from the engine), which it then calls ``label``.

        An engine that runs is paused meanwhile. ``flush_cache`` must be False after an ``in_place`` pause.
        EngineRejected: the old weights serve on. EngineDirty: unknown weights.
        """
        before = await self._label()
        is_ours = not await self._is_paused()
        if is_ours:
            await self.pause("retract" if flush_cache else "in_place")
        try:
            await self._name(_NO_LABEL)
            refused = await self._replace(path, timeout_s)
            if flush_cache and not refused:
                await self.flush_cache()
            held = before if refused else label
            await self._name(held)
            named = await self._label()
        except EngineError as error:
            raise EngineDirty(f"{self.url}: a weight load failed: {error}") from error
        if named != held:
            raise EngineDirty(f"{self.url}: holds weights {named!r} after a load of {label!r}")
        if is_ours:
            await self.resume()
        if refused:
            self._refuse(f"{label!r} was not loaded: {refused}")

    async def _replace(self, path: Path, timeout_s: float) -> str:
        """Why nothing was replaced; empty if everything was."""
        order: Body = {"method": _LOAD, "args": [str(path)]}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        answer = await self._call("POST", "/collective_rpc", order, admin=True, timeout=timeout)
        refusals = {one.refused for one in self._read(answer.content, _Loaded).results}
        if len(refusals) != 1:
            raise EngineProtocolError(f"its ranks disagree on a load: {sorted(refusals)}")
        return refusals.pop()

    async def load_deltas(
        self, paths: Sequence[Path], label: str, *, base: str, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        self._refuse("it takes whole versions, no deltas")

    async def load_adapter(self, path: Path, label: str, *, flush_cache: bool = True, timeout_s: float = 600.0) -> None:
        self._refuse("it takes whole versions, no adapters")

    async def join_weight_group(
        self, *, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        self._refuse(_FOLDERS_ONLY)

    async def begin_weight_update(self) -> None:
        self._refuse(_FOLDERS_ONLY)

    async def receive_weights(
        self,
        tensors: Sequence[tuple[str, str, list[int]]],
        *,
        group: str,
        label: str | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        self._refuse(_FOLDERS_ONLY)

    async def end_weight_update(self) -> None:
        self._refuse(_FOLDERS_ONLY)

    async def leave_weight_group(self, name: str) -> None:
        self._refuse(_FOLDERS_ONLY)

    async def info(self) -> EngineInfo:
        """Without development mode its weights have no label; ``capabilities`` then says so."""
        models = await self._models()
        label = _NO_LABEL
        with contextlib.suppress(EngineRejected):
            label = await self._label()
        return EngineInfo(label=label, model_path=next((one.root for one in models.data), None))

    async def capabilities(self) -> Capabilities:
        """By the paths that answer to a question which none of them can act on."""
        version = self._read((await self._call("GET", "/version")).content, _Version).version
        needed = (*_SAMPLING_PATHS, *_TRAINING_PATHS)
        answers = await asyncio.gather(
            *(self._send("POST", path, {}) for path in _SAMPLING_PATHS),
            *(self._send("GET", path, admin=True) for path in _TRAINING_PATHS),
        )
        missing = [path for path, answer in zip(needed, answers, strict=True) if answer.status_code in _NOT_THERE]
        advice = "VLLM_SERVER_DEV_MODE=1" if set(missing) <= set(_TRAINING_PATHS) else "--enable-scale-out"
        if not missing and not await self._has_our_worker():
            missing, advice = [_LOAD], _WORKER
        return Capabilities(
            f"vLLM {version}",
            names_versions=not missing,
            advice=f"0.32.0 does, started with {advice}; missing: {', '.join(missing)}" if missing else "",
            group_problem=_FOLDERS_ONLY,
            quantization=await self._quantization(),
            context_tokens=await self._longest_sequence(),
            is_unguarded=is_routable(self._base) and not missing and await self._takes_control_without_key(),
        )

    async def _models(self) -> _Models:
        return self._read((await self._call("GET", "/v1/models")).content, _Models)

    async def _longest_sequence(self) -> int:
        return min((one.max_model_len for one in (await self._models()).data if one.max_model_len), default=0)

    async def _quantization(self) -> str:
        """Development mode tells its configuration."""
        answer = await self._send("GET", "/server_info?config_format=json", admin=True)
        with contextlib.suppress(msgspec.DecodeError):
            return quantization.named(msgspec.json.decode(answer.content, type=_ServerInfo).vllm_config.said())
        return ""

    async def load(self) -> EngineLoad:
        """Its load, by its own account."""
        return load_in((await self._call("GET", "/metrics")).content.decode("utf-8", "replace"))

    async def is_ready(self) -> bool:
        """Whether new requests would run at once. False while paused, and for an engine that cannot be reached."""
        try:
            answer = await self._send("GET", "/health")
            return answer.status_code == 200 and not await self._is_paused()
        except EngineError:
            return False

    async def _has_our_worker(self) -> bool:
        answer = await self._send("POST", "/collective_rpc", {"method": _GREET}, admin=True)
        return answer.status_code == 200

    async def _takes_control_without_key(self) -> bool:
        return (await self._send("GET", "/is_paused", shows_key=False)).status_code == 200

    async def _is_paused(self) -> bool:
        return self._read((await self._call("GET", "/is_paused", admin=True)).content, _Pause).is_paused

    async def _label(self) -> str:
        return self._read((await self._call("GET", "/weight_info", admin=True)).content, _WeightInfo).weight_version

    async def _name(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": label}, admin=True)

    def _refuse(self, why: str) -> NoReturn:
        raise EngineRejected(f"{self.url}: {why}")

    def _read_generation(self, content: bytes, rid: str, max_new_tokens: int, vocab_size: int | None) -> Generation:
        answer = self._read(content, _Answer)
        if len(answer.choices) != 1 or answer.request_id != _RID_PREFIX + rid:
            raise EngineProtocolError(
                f"{self.url}: {len(answer.choices)} answers to {answer.request_id!r}, asked {rid!r}"
            )
        choice = answer.choices[0]
        output_ids, found = choice.token_ids, choice.logprobs.content or []
        logprobs = [one.logprob for one in found]
        problem = (
            ([one.token_id for one in found] != output_ids and "log-probs of different ids")
            or (min(logprobs, default=0.0) <= _NO_LOGPROB and "log-probs that are none")
            or tokens_problem(output_ids, logprobs, max_new_tokens, vocab_size)
        )
        if problem:
            raise EngineProtocolError(f"{self.url}: answer of {len(output_ids)} tokens with {problem}")
        details = answer.usage.prompt_tokens_details if answer.usage else None
        try:
            return Generation(
                output_ids=output_ids,
                logprobs=logprobs,
                spans=tuple(one for one in choice.weight_versions or () if one.end != one.start),
                finish_reason=self._read_finish(choice.finish_reason),
                cached_tokens=(details.cached_tokens or 0) if details else 0,
                rid=rid,
            )
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{self.url}: {error}") from error

    def _read_finish(self, reason: str) -> FinishReason:
        match reason:
            case "stop" | "length" | "abort":
                return reason
        raise EngineProtocolError(f"{self.url}: unknown finish reason {reason!r}")

    def _read(self, content: bytes, form: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=form)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.url}: not an answer of vLLM: {error}") from error


@functools.lru_cache(maxsize=256)
def _sampling_params(
    max_new_tokens: int, temperature: float, stop_token_ids: tuple[int, ...], sampling_seed: int | None
) -> msgspec.Raw:
    """As JSON. Every key that shapes the distribution is set, so that no default of a model or a server can bend it."""
    params: dict[str, float | bool | list[int]] = {
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "n": 1,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": False,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
    if sampling_seed is not None:
        params["seed"] = sampling_seed
    return msgspec.Raw(msgspec.json.encode(params))


def _seed_at(sampling_seed: int | None, place: int) -> int | None:
    """Its generator begins anew with every request: the next piece of an answer would draw the numbers of the first."""
    if sampling_seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{sampling_seed}/{place}".encode(), digest_size=4).digest(), "big") >> 1


@functools.lru_cache(maxsize=256)
def _salt(extra_key: str) -> str:
    """It takes no slash, of which our labels are full, and at most 128 characters."""
    return hashlib.blake2b(extra_key.encode(), digest_size=16).hexdigest()


@functools.cache
def _scoring_params() -> msgspec.Raw:
    return msgspec.Raw(
        msgspec.json.encode(
            {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
        )
    )
