"""The HTTP face of the embedded engine: paths, status codes and bodies of the default engine protocol.

Rule: every answer has the shape of the server that defines the protocol (``docs/engines.md`` names it), so that one
client serves both. It differs on purpose, and never to a caller's harm: an abort matches the request id exactly
(that server matches live ids by prefix), also reaches requests that were posted while paused, and never loses sampled
tokens; ``/health`` does not generate; a weight load reads and checks the whole checkpoint first, so wrong shapes are a
400 and not the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gspo_core import lora_adapter
from services.engine.access import EngineAccess
from services.engine.checkpoint import CheckpointRejected
from services.engine.engine import CacheNotFlushed, EmbeddedEngine
from services.engine.protocol import (
    AbortBody,
    BadRequest,
    GenerateReader,
    PauseBody,
    UpdateFromAdapterBody,
    UpdateFromDeltasBody,
    UpdateFromDiskBody,
    UpdateLabelBody,
    invalid_body,
    invalid_value,
    read_body,
    scored,
)
from services.engine.scheduler import DuplicateRequest, RequestFailed
from services.engine.weight_receiver import JoinBody, LeaveBody, TensorsBody, WeightReceiver, WeightsRefused
from services.engines.keys import KeyPair
from services.engines.process_group import gpu_uuid
from services.files import weight_deltas
from services.files.weight_deltas import DeltaRefused

PROTOCOL_VERSION = "0.5.23"
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed: requests are running on it."
_encode = msgspec.json.Encoder().encode


def create_app(
    engine: EmbeddedEngine,
    reader: GenerateReader,
    decode: Callable[[list[int]], str],
    info: Mapping[str, int],
    keys: KeyPair | None = None,
) -> Starlette:
    """``decode`` renders the ``text`` of answers, which is for display only; ``info`` goes into ``/server_info``."""
    handlers = _Handlers(engine, reader, decode, info)
    routes = [
        Route(path, getattr(handlers, name), methods=methods)
        for methods, paths in _ROUTES.items()
        for path, name in paths.items()
    ]

    async def on_bad_request(_request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, BadRequest)
        return _json(error.body, 400)

    async def on_http_error(_request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json({"detail": error.detail}, error.status_code)

    return Starlette(
        routes=routes,
        exception_handlers={BadRequest: on_bad_request, HTTPException: on_http_error},
        middleware=[Middleware(EngineAccess, keys=keys or KeyPair(), control=_CONTROL)],
    )


_ROUTES: dict[tuple[str, ...], dict[str, str]] = {
    ("POST",): {
        "/generate": "generate",
        "/abort_request": "abort",
        "/pause_generation": "pause",
        "/continue_generation": "resume",
        "/update_weights_from_disk": "update_weights",
        "/update_weights_from_deltas": "follow_deltas",
        "/update_weights_from_adapter": "take_adapter",
        "/update_weight_version": "update_label",
        "/begin_weight_update": "begin_update",
        "/end_weight_update": "end_update",
        "/init_weights_update_group": "join_group",
        "/update_weights_from_distributed": "receive_weights",
        "/destroy_weights_update_group": "leave_group",
    },
    ("GET", "POST"): {"/flush_cache": "flush"},
    ("GET",): {
        "/health": "alive",
        "/health_generate": "alive",
        "/ping": "alive",
        "/ready": "ready",
        "/model_info": "model_info",
        "/get_model_info": "model_info",
        "/server_info": "server_info",
        "/get_server_info": "server_info",
        "/v1/loads": "loads",
    },
}


_CONTROL = frozenset(path for methods, paths in _ROUTES.items() if "POST" in methods for path in paths) - {"/generate"}
"""Paths of calls that change weights or what runs."""


class _Handlers:
    def __init__(
        self,
        engine: EmbeddedEngine,
        reader: GenerateReader,
        decode: Callable[[list[int]], str],
        info: Mapping[str, int],
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._decode = decode
        self._info = info
        self._first_model_dir = str(engine.model_dir)
        self._receiver = WeightReceiver(engine)

    async def generate(self, http: HttpRequest) -> Response:
        content = await http.body()
        if (scoring := self._reader.scoring(content)) is not None:
            return _json(scored(scoring[0], *await self._engine.score(scoring[0]), scoring[1]))
        request, answer = self._reader.read(content)
        try:
            if not await _unless_disconnected(http, self._engine.generate(request)):
                return Response(status_code=499)
        except DuplicateRequest as error:
            raise invalid_value(f"Duplicate request ID detected: {error}") from error
        except RequestFailed as error:
            return _json({"error": {"message": str(error)}}, 500)
        return _json(answer(request, self._engine.label, self._decode(request.output_ids)))

    async def abort(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), AbortBody)
        if body.abort_all:
            self._engine.abort_all()
        elif body.rid:
            self._engine.abort(body.rid)
        return Response()

    async def pause(self, http: HttpRequest) -> Response:
        match read_body(await http.body(), PauseBody).mode:
            case "abort" | "retract" | "in_place" as mode:
                self._engine.pause(mode)
            case _:
                raise invalid_body("mode: Input should be 'abort', 'retract' or 'in_place'")
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: HttpRequest) -> Response:
        read_body(await http.body(), dict[str, Any])
        self._engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, http: HttpRequest) -> Response:
        try:
            timeout_s = float(http.query_params.get("timeout", "0"))
        except ValueError as error:
            raise invalid_body("timeout is a number of seconds") from error
        if await self._engine.flush(timeout_s):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", status_code=400)

    async def update_weights(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), UpdateFromDiskBody)
        if body.abort_all_requests:
            self._engine.abort_all()
        try:
            await self._engine.update_weights(Path(body.model_path), body.weight_version, flush_cache=body.flush_cache)
        except CheckpointRejected as error:
            # The protocol has no code for a failure before any weight was touched; clients recognise these words.
            return _updated(False, f"Failed to get weights iterator: {error}")
        except CacheNotFlushed:
            return _updated(False, _NOT_FLUSHED)
        suffix = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return _updated(True, f"Succeeded to update model weights.{suffix}")

    async def take_adapter(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), UpdateFromAdapterBody)
        try:
            await self._engine.take_adapter(Path(body.path), body.weight_version, flush_cache=body.flush_cache)
        except CheckpointRejected as error:
            return _updated(False, f"Failed to get weights iterator: {error}")
        except CacheNotFlushed:
            return _updated(False, _NOT_FLUSHED)
        return _updated(True, f"Weight version updated to {body.weight_version}.")

    async def follow_deltas(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), UpdateFromDeltasBody)
        if not body.paths:
            raise invalid_body("paths: one version at least")
        directories = [Path(path) for path in body.paths]
        try:
            await self._engine.follow_deltas(
                directories, body.base_version, body.weight_version, flush_cache=body.flush_cache
            )
        except DeltaRefused as error:
            return _updated(False, str(error))
        except CacheNotFlushed:
            return _updated(False, _NOT_FLUSHED)
        return _updated(True, f"Weight version updated to {body.weight_version}.")

    async def update_label(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), UpdateLabelBody)
        if body.abort_all_requests:
            self._engine.abort_all()
        self._engine.relabel(body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return _json({"success": True, "message": message, "new_version": body.new_version})

    async def begin_update(self, _http: HttpRequest) -> Response:
        return _succeeded(self._receiver.begin, "Success")

    async def end_update(self, _http: HttpRequest) -> Response:
        return _succeeded(self._receiver.end, "Success")

    async def join_group(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), JoinBody)
        return await _unless_refused(http, self._receiver.join(body), "Succeeded to initialize custom process group.")

    async def receive_weights(self, http: HttpRequest) -> Response:
        body = read_body(await http.body(), TensorsBody)
        suffix = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return await _unless_refused(
            http, self._receiver.receive(body), f"Succeeded to update parameter online.{suffix}"
        )

    async def leave_group(self, http: HttpRequest) -> Response:
        name = read_body(await http.body(), LeaveBody).group_name
        return _succeeded(lambda: self._receiver.leave(name), "Succeeded to destroy custom process group.")

    async def alive(self, _http: HttpRequest) -> Response:
        return Response()

    async def ready(self, _http: HttpRequest) -> Response:
        return Response(status_code=200 if self._engine.scheduler.paused is None else 503)

    async def model_info(self, _http: HttpRequest) -> Response:
        config = self._engine.decoder.config
        return _json(
            {
                "model_path": str(self._engine.model_dir),
                "served_model_name": str(self._engine.model_dir),
                "tokenizer_path": self._first_model_dir,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.label,
                "load_format": "safetensors",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, _http: HttpRequest) -> Response:
        decoder = self._engine.decoder
        return _json(
            {
                "version": PROTOCOL_VERSION,
                "frontend": "embedded",
                "model_path": self._first_model_dir,
                "context_length": decoder.context_length,
                "max_req_input_len": decoder.context_length,
                "vocab_size": decoder.vocab_size,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "device": str(decoder.device),
                **({"gpu_uuid": gpu_uuid(decoder.device)} if decoder.device.type == "cuda" else {}),
                "status": "ready",
                "weight_deltas": weight_deltas.FORMAT,
                "weight_adapters": lora_adapter.FORMAT,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                **self._info,
            }
        )

    async def loads(self, _http: HttpRequest) -> Response:
        now = datetime.now(UTC).isoformat()
        return _json({"timestamp": now, "version": PROTOCOL_VERSION, "loads": [self._engine.scheduler.load()]})


async def _unless_disconnected(http: HttpRequest, work: Awaitable[None]) -> bool:
    """Run ``work``; cancel it and return False when the client leaves. Errors of ``work`` propagate."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(http))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, gone):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnection(http: HttpRequest) -> None:
    """The body was read: the next message says that the client has left."""
    await http.receive()


def _succeeded(act: Callable[[], None], message: str) -> Response:
    try:
        act()
    except WeightsRefused as error:
        return _told(False, str(error))
    return _told(True, message)


async def _unless_refused(http: HttpRequest, work: Awaitable[None], message: str) -> Response:
    """A client that leaves cancels its request."""
    try:
        is_done = await _unless_disconnected(http, work)
    except WeightsRefused as error:
        return _told(False, str(error))
    except CacheNotFlushed:
        return _told(False, _NOT_FLUSHED)
    return _told(True, message) if is_done else Response(status_code=499)


def _json(body: object, status: int = 200) -> Response:
    return Response(_encode(body), status, media_type="application/json")


def _told(success: bool, message: str) -> Response:
    return _json({"success": success, "message": message}, 200 if success else 400)


def _updated(success: bool, message: str) -> Response:
    return _json({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)
