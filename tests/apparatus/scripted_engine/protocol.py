"""Paths, status codes and bodies of a scripted engine, by the version of the real server that it plays.

Rule: what would end a real server's process ends this one (``Died``). Streaming, batches and text are not played.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tests.apparatus.scripted_engine.engine import Ask, Died, DuplicateId, Replaced, ScriptedEngine

_SAMPLING_KEYS = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "json_schema", "regex", "ebnf"),
    *("structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice"),
}
_UNPLAYED = ("stream", "top_logprobs_num", "token_ids_logprob")
Answer = tuple[int, bytes]


class _Refused(Exception):
    def __init__(self, status: int, body: object) -> None:
        super().__init__(body)
        self.status, self.body = status, body


async def answer(
    engine: ScriptedEngine, method: str, path: str, query: Mapping[str, str], content: bytes
) -> tuple[int, bytes]:
    """(status, body). Raises ``Died`` when the connection would break."""
    handler = _handler(engine, method, path)
    if isinstance(handler, tuple):
        return handler
    for fault in engine.faults:
        if fault.strikes(path):
            if (struck := await _strike(engine, fault.kind)) is not None:
                return struck
            if fault.kind == "skew":
                return _skewed(await handler(engine, _body(content), query))
    try:
        return await _unless_dead(engine, handler(engine, _body(content), query))
    except _Refused as refused:
        return _json(refused.body, refused.status)


async def _strike(engine: ScriptedEngine, kind: str) -> Answer | None:
    match kind:
        case "drop":
            raise Died
        case "die":
            engine.kill()
            raise Died
        case "error":
            return 500, b"scripted error"
        case "refuse":
            return 400, b"scripted refusal"
        case "garbage":
            return _json({"text": "", "output_ids": [1], "meta_info": {}})
        case "hang":
            await engine.dead.wait()
            raise Died
    return None


def _skewed(result: Answer) -> Answer:
    body = msgspec.json.decode(result[1])
    body["meta_info"]["output_token_logprobs"][-1][0] -= 0.5
    return _json(body, result[0])


async def _unless_dead(engine: ScriptedEngine, work: Awaitable[Answer]) -> Answer:
    working = asyncio.ensure_future(work)
    dying = asyncio.ensure_future(engine.dead.wait())
    try:
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        if engine.dead.is_set():
            raise Died
        return working.result()
    finally:
        for task in (working, dying):
            task.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)


def _handler(engine: ScriptedEngine, method: str, path: str) -> _Handler | Answer:
    if engine.dead.is_set():
        raise Died
    methods, handler, since = _ROUTES.get(path, ((), None, (99,)))
    gone = path in ("/get_weight_version", "/get_load") and engine.profile >= (0, 5, 21)
    if handler is None or engine.profile < since or gone:
        return _json({"detail": "Not Found"}, 404)
    return handler if method in methods else _json({"detail": "Method Not Allowed"}, 405)


async def _generate(engine: ScriptedEngine, body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    arrived = time.perf_counter()
    if body.get("logprob_start_len") == 0 and (body.get("sampling_params") or {}).get("max_new_tokens") == 0:
        return await _score(engine, body)
    ask = _read_ask(engine, body)
    try:
        await engine.generate(ask)
    except DuplicateId as error:
        raise _value_error(f"Duplicate request ID detected: {error}") from error
    num, ran = len(ask.output_ids), ask.cached_tokens is not None
    meta: dict[str, Any] = {"id": ask.rid, "finish_reason": ask.finish, "weight_version": engine.shown_label}
    if ran:
        meta |= {
            "prompt_tokens": len(ask.prompt),
            "num_retractions": ask.num_retractions,
            "reasoning_tokens": 0,
            "cached_tokens": ask.cached_tokens,
            "cached_tokens_details": {"device": ask.cached_tokens, "host": 0} if ask.cached_tokens else None,
            "dp_rank": None,
        }
    if body.get("return_logprob"):
        meta |= {
            "input_token_logprobs": [],
            "output_token_logprobs": [[p, i, None] for p, i in zip(ask.logprobs, ask.output_ids, strict=True)],
            "output_token_logprobs_length": num,
        }
    meta |= {
        "completion_tokens": num,
        "weight_versions": ask.spans(engine.label),
        "e2e_latency": time.perf_counter() - arrived,
        "response_sent_to_client_ts": time.time(),
    }
    shown = {"prompt_token_ids": ask.prompt} if body.get("return_prompt_token_ids") else {}
    return _json({"text": "", "output_ids": ask.output_ids, "meta_info": meta, **shown})


async def _score(engine: ScriptedEngine, body: dict[str, Any]) -> Answer:
    ids = _input_ids(engine, body)
    logprobs = [None, *await engine.score(ids)]
    meta = {
        "id": body.get("rid") or uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "weight_version": engine.label,
        "input_token_logprobs": [[value, token_id, None] for value, token_id in zip(logprobs, ids, strict=True)],
        "output_token_logprobs": [],
        "completion_tokens": 0,
        "weight_versions": [{"version": engine.label, "start": 0, "end": 0}],
    }
    return _json({"text": "", "output_ids": [], "meta_info": meta})


def _read_ask(engine: ScriptedEngine, body: dict[str, Any]) -> Ask:
    params = body.get("sampling_params") or {}
    for key in params.keys() - _SAMPLING_KEYS:
        if engine.profile < (0, 5, 22):
            raise _Refused(500, "Internal Server Error")
        raise _Refused(400, {"error": f"unknown field `{key}`, expected one of {sorted(_SAMPLING_KEYS)}"})
    for name in _UNPLAYED:
        if body.get(name):
            raise _value_error(f"a scripted engine does not play {name}")
    ids = _input_ids(engine, body)
    max_new_tokens, temperature = params.get("max_new_tokens", 128), params.get("temperature", 1.0)
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature >= 0):
        raise _value_error(f"temperature must be a non-negative finite number, got {temperature}.")
    context = engine.context_length
    if len(ids) >= context:
        raise _value_error(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        )
    if len(ids) + max_new_tokens > context:
        raise _value_error(f"Requested token count exceeds the model's maximum context length of {context} tokens.")
    stops = () if params.get("ignore_eos") else params.get("stop_token_ids") or ()
    rid = body.get("rid") or uuid.uuid4().hex
    return Ask(rid, ids, max_new_tokens, float(temperature), frozenset(stops), body.get("extra_key"))


def _input_ids(engine: ScriptedEngine, body: dict[str, Any]) -> list[int]:
    ids = body.get("input_ids")
    if ids is None:
        raise _value_error("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list) or any(not isinstance(one, (int, list)) for one in ids):
        raise _body_error("input_ids is a list of ints")
    if not ids:
        raise _value_error("input_ids cannot be empty.")
    if any(isinstance(one, list) or not 0 <= one < engine.vocab_size for one in ids):
        engine.kill()
        raise Died
    return list(ids)


async def _abort(engine: ScriptedEngine, body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if body.get("abort_all"):
        engine.abort_all()
    elif body.get("rid"):
        engine.abort(body["rid"])
    return 200, b""


async def _pause(engine: ScriptedEngine, body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    mode = body.get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        raise _body_error("mode: Input should be 'abort', 'retract' or 'in_place'")
    await engine.pause(mode)
    return _json({"message": "Generation paused successfully.", "status": "ok"})


async def _resume(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    await engine.resume()
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def _flush(engine: ScriptedEngine, _body: dict[str, Any], query: Mapping[str, str]) -> Answer:
    done = await engine.flush(float(query.get("timeout", "0")))
    return (200, b"Cache flushed.\n") if done else (400, b"Flush cache failed.\n")


async def _update(engine: ScriptedEngine, body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if not isinstance(path := body.get("model_path"), str):
        raise _body_error("1 validation error: model_path: Field required")
    if body.get("abort_all_requests"):
        engine.abort_all()
    if not await asyncio.to_thread(Path(path).is_dir):
        return _updated(False, f"Failed to get weights iterator: no such folder {path}")
    try:
        await engine.update(path, label := body.get("weight_version"), flush=body.get("flush_cache", True))
    except Replaced:
        return _updated(False, "Weights were updated, but the cache was not flushed.")
    suffix = f" Weight version updated to {label}." if label else ""
    return _updated(True, f"Succeeded to update model weights.{suffix}")


async def _relabel(engine: ScriptedEngine, body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if body.get("abort_all_requests", True):
        engine.abort_all()
    label = body["new_version"]
    await engine.relabel(label)
    return _json({"success": True, "message": f"Weight version updated to {label}", "new_version": label})


async def _begin(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if engine.session_open:
        return _updated(False, "a weight-update session is already open; call end_weight_update() first")
    engine.session_open = True
    return _updated(True, "Success")


async def _end(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if not engine.session_open:
        return _updated(False, "no weight-update session is open; call begin_weight_update() first")
    engine.session_open = False
    return _updated(True, "Success")


async def _distributed(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    if engine.profile >= (0, 5, 21) and not engine.session_open:
        return _updated(
            False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        )
    return _updated(False, "a scripted engine has no process group")


async def _ready(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    return (200 if engine.paused is None else 503), b""


async def _alive(_engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    return 200, b""


async def _model_info(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    return _json(
        {
            "model_path": engine.shown_weights,
            "tokenizer_path": engine.first_weights,
            "weight_version": engine.shown_label,
            "is_generation": True,
            "model_type": "scripted",
            "architectures": engine.architectures,
        }
    )


async def _server_info(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    version = ".".join(map(str, engine.profile))
    sizes = {"vocab_size": engine.vocab_size, "context_length": engine.context_length}
    return _json({"version": version, **sizes, **engine.layout})


async def _loads(engine: ScriptedEngine, _body: dict[str, Any], _query: Mapping[str, str]) -> Answer:
    return _json({"timestamp": datetime.now(UTC).isoformat(), "loads": [engine.load()]})


_Handler = Callable[[ScriptedEngine, dict[str, Any], Mapping[str, str]], Awaitable[Answer]]
_POST, _GET, _BOTH = ("POST",), ("GET",), ("GET", "POST")
_ROUTES: dict[str, tuple[tuple[str, ...], _Handler | None, tuple[int, ...]]] = {
    "/generate": (_POST, _generate, (0,)),
    "/abort_request": (_POST, _abort, (0,)),
    "/pause_generation": (_POST, _pause, (0,)),
    "/continue_generation": (_POST, _resume, (0,)),
    "/flush_cache": (_BOTH, _flush, (0,)),
    "/update_weights_from_disk": (_POST, _update, (0,)),
    "/update_weight_version": (_POST, _relabel, (0,)),
    "/begin_weight_update": (_POST, _begin, (0, 5, 21)),
    "/end_weight_update": (_POST, _end, (0, 5, 21)),
    "/update_weights_from_distributed": (_POST, _distributed, (0,)),
    "/ready": (_GET, _ready, (0, 5, 20)),
    "/health": (_GET, _alive, (0,)),
    "/ping": (_GET, _alive, (0,)),
    "/model_info": (_GET, _model_info, (0,)),
    "/server_info": (_GET, _server_info, (0,)),
    "/v1/loads": (_GET, _loads, (0,)),
    "/get_weight_version": (_GET, _model_info, (0,)),
}


def _body(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise _body_error(f"1 validation error: JSON decode error: {error}") from error


def _value_error(message: str) -> _Refused:
    return _Refused(400, {"error": {"message": message}})


def _body_error(message: str) -> _Refused:
    return _Refused(400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def _updated(success: bool, message: str) -> Answer:
    return _json({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)


def _json(body: object, status: int = 200) -> Answer:
    return status, msgspec.json.encode(body)
