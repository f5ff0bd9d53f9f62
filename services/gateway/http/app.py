"""The routes of the gateway: what agents speak to, given a base URL and the key of an episode.

Rule: a request is led by its exact path and method, or by what a path begins with: another spelling of a path is no
route, since a redirected request loses its body in some clients. It is answered in the shape of the dialect that its
path belongs to, errors included. What an episode does with a request is not known here.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gspo_core.json_value import JSON
from gspo_core.types import MAX_USER_CHARS
from services.episodes.fingerprints import of_messages
from services.episodes.keys import PAYING
from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.asks import VOLATILE
from services.gateway.dialects.dialect import Dialect, ParsedRequest, final
from services.gateway.dialects.fields import EPISODE, RECEIPT
from services.gateway.dialects.gemini import COUNT, PREFIX, PREFIXES, STREAM, VERBS, Gemini, joined, path_of
from services.gateway.dialects.openai_chat import OpenAIChat
from services.gateway.dialects.openai_responses import OpenAIResponses
from services.gateway.dialects.sent import FieldValue, Reader, without_index
from services.gateway.dialects.turns import PendingAnswer, Refusal, Turns
from services.gateway.http.bodies import SMALL_BODY_BYTES, Bodies, BodyTooLarge, Seats
from services.gateway.http.forwarding import FORWARDED_BY, TURN, Receipts
from services.gateway.http.forwarding import RECEIPT as RECEIPT_PATH
from services.gateway.http.requests import TELLABLE, GatewayMiddleware, dialect_of, is_gemini, key_of, refused
from services.gateway.http.streams import Pace, TurnResponse, fault_reply, json_reply

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": AnthropicMessages(),
    PREFIX: Gemini(),
}
"""By their path; Gemini's go on with the model, and with what is asked of it."""
_COUNTING = AnthropicMessages(counts=True)
MAX_TOLD = 64
_GEMINI_COUNTING = Gemini(counts=True)
Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]


def build_app(
    turns: Turns,
    *,
    is_ready: Callable[[], bool],
    stopping: asyncio.Event,
    pace: Pace | None = None,
    forwarding: Middleware | None = None,
    seats: Seats | None = None,
    bodies: Bodies | None = None,
) -> ASGIApp:
    """``stopping`` is set when the process is asked to leave: who waits for an answer is then sent elsewhere.
    ``forwarding`` passes on what another gateway is to answer."""
    routes = _Routes(turns, is_ready, stopping, pace or Pace(), bodies or Bodies())
    posts = dict.fromkeys((path for path in DIALECTS if path != PREFIX), routes.turn) | {
        "/v1/messages/count_tokens": routes.count_tokens,
        "/v1/episode/reward": routes.reward,
        "/v1/episode/finish": routes.finish,
        RECEIPT_PATH: routes.receipt,
    }
    gets = {**dict.fromkeys(PREFIXES, routes.models), "/healthz": routes.healthz, "/readyz": routes.readyz}
    below = [f"{prefix}/" for prefix in PREFIXES]
    app: ASGIApp = Routing(posts, gets, dict.fromkeys(below, routes.gemini), dict.fromkeys(below, routes.model))
    if forwarding is not None:
        kind, given, named = forwarding
        app = kind(app, *given, **named)
    return GatewayMiddleware(app, paths=posts.keys() | gets.keys(), seats=seats or Seats())


class Routing:
    """Leads a request to what answers it."""

    def __init__(
        self,
        posts: Mapping[str, Endpoint],
        gets: Mapping[str, Endpoint],
        posts_below: Mapping[str, Endpoint],
        gets_below: Mapping[str, Endpoint],
    ) -> None:
        """``..._below``: all paths that begin so; their endpoints know which of these there are."""
        self._by_method = {"POST": posts, "GET": gets, "HEAD": gets}
        self._below = {"POST": posts_below, "GET": gets_below, "HEAD": gets_below}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer: ASGIApp
        try:
            answer = await self._endpoint(scope["method"], scope["path"])(request)
        except (HTTPException, Refusal, BodyTooLarge) as error:
            answer = await refused(request, error)
        await answer(scope, receive, send)

    def _endpoint(self, method: str, path: str) -> Endpoint:
        """Raises ``HTTPException``."""
        endpoint = self._by_method.get(method, {}).get(path)
        if endpoint is None:
            below = self._below.get(method, {})
            endpoint = next((one for begin, one in below.items() if path.startswith(begin)), None)
        if endpoint is None:
            is_known = any(path in endpoints for endpoints in self._by_method.values())
            raise HTTPException(405 if is_known else 404)
        return endpoint


class _Routes:
    def __init__(
        self, turns: Turns, is_ready: Callable[[], bool], stopping: asyncio.Event, pace: Pace, bodies: Bodies
    ) -> None:
        self._turns = turns
        self._is_ready = is_ready
        self._stopping = stopping
        self._leaving: asyncio.Task[bool] | None = None
        self._pace = pace
        self._bodies = bodies
        self._receipts = Receipts()

    async def turn(self, request: Request) -> TurnResponse:
        return await self._turn(request, request.url.path, {})

    async def gemini(self, request: Request) -> ASGIApp:
        path = path_of(request.url.path)
        if path is None:
            raise HTTPException(404)
        if path.verb == COUNT:
            return await self._count(request, _GEMINI_COUNTING, "totalTokens", path.fields())
        if path.verb == STREAM and request.query_params.get("alt") != "sse":
            raise FieldValue(None, "alt").fault("must be sse: a stream is events here, and no list")
        return await self._turn(request, PREFIX, path.fields())

    async def _turn(self, request: Request, place: str, fields: Mapping[str, JSON]) -> TurnResponse:
        """``fields``: what the path says of it."""
        dialect, key = DIALECTS[place], key_of(request.headers)
        # Before the body is read: without a key that opens something, nothing is.
        names = await self._turns.model_names(key)
        with self._bodies.of(key) as body:
            question = await body.read(request, partial(_question, dialect, request.headers, fields))
            ask = replace(
                question.ask,
                dialect=_name_of(place),
                model=question.model,
                user=user_of(question.body),
                dropped=tuple(one.removeprefix(VOLATILE) for one in question.ignored if one.startswith(VOLATILE)),
                unsupported=question.unsupported,
            )
            pending: PendingAnswer = await self._turns.ask(key, ask)
        question = question.without_history()
        model = question.model if question.model in names else names[0]
        headers = _ignored(question, names, pending.left_out)
        if FORWARDED_BY in request.headers:
            headers, pending = {**headers, TURN: pending.id}, self._receipts.through_a_neighbour(key, pending)
        self._leaving = self._leaving or asyncio.create_task(self._stopping.wait(), name="leaving")
        return TurnResponse(dialect, question, model, pending, headers, self._leaving, self._pace)

    async def count_tokens(self, request: Request) -> Response:
        return await self._count(request, _COUNTING, "input_tokens", {})

    async def _count(self, request: Request, dialect: Dialect, name: str, fields: Mapping[str, JSON]) -> Response:
        """``name``: of the number in the answer."""
        key = key_of(request.headers)
        names = await self._turns.model_names(key)
        with self._bodies.of(key) as body:
            question = await body.read(request, partial(_question, dialect, request.headers, fields))
            count = await self._turns.count_tokens(key, replace(question.ask, unsupported=question.unsupported))
        return json_reply({name: count}, _ignored(question, names))

    async def models(self, request: Request) -> Response:
        names = await self._turns.model_names(key_of(request.headers))
        if is_gemini(request.url.path, request.headers):
            return json_reply({"models": [_model_of_gemini(name) for name in names]}, {})
        in_anthropics_shape = "anthropic-version" in request.headers
        return json_reply(_models_of_anthropic(names) if in_anthropics_shape else _models_of_openai(names), {})

    async def model(self, request: Request) -> Response:
        if path_of(request.url.path) is not None:
            raise HTTPException(405)
        names = await self._turns.model_names(key_of(request.headers))
        asked = next(request.url.path.removeprefix(f"{one}/") for one in PREFIXES if request.url.path.startswith(one))
        if asked not in names:
            fault = final(404, "model_not_found", f"there is no model {asked[:200]!r} here, only {', '.join(names)}")
            return fault_reply(dialect_of(request.url.path, request.headers), fault, {})
        if is_gemini(request.url.path, request.headers):
            return json_reply(_model_of_gemini(asked), {})
        is_anthropics = "anthropic-version" in request.headers
        return json_reply(_model_of_anthropic(asked) if is_anthropics else _model_of_openai(asked), {})

    async def reward(self, request: Request) -> Response:
        key = key_of(request.headers, PAYING)
        sent = await self._small(key, request)
        taken = Reader(EPISODE, is_strict=True).take(sent)
        reward, turn, token = taken.need("reward"), taken.get("turn"), taken.get("token")
        value = reward.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise reward.fault("must be a finite number")
        turn_id = "" if turn is None else turn.name()
        token_text = request.headers.get("idempotency-key", "") if token is None else token.name()
        await self._turns.reward(key, float(value), turn=turn_id, token=token_text)
        return json_reply({"reward": float(value), "turn": turn_id or None}, {})

    async def finish(self, request: Request) -> Response:
        key = key_of(request.headers)
        await self._turns.finish(key)
        return json_reply({"finished": True}, {})

    async def receipt(self, request: Request) -> Response:
        """Takes the receipt of another gateway, which alone can prove that it is one (``ForwardingMiddleware``)."""
        if FORWARDED_BY not in request.headers:
            raise HTTPException(404)
        key = key_of(request.headers)
        await self._turns.model_names(key)
        sent = await self._small(key, request)
        taken = Reader(RECEIPT, is_strict=True).take(sent)
        await self._receipts.settle(key, taken.need("turn").name(), is_delivered=taken.need("delivered").flag())
        return json_reply({}, {})

    async def _small(self, key: str, request: Request) -> FieldValue:
        with self._bodies.of(key) as body:
            return await body.read(request, FieldValue, SMALL_BODY_BYTES)

    async def healthz(self, request: Request) -> Response:
        return json_reply({"status": "ok"}, {})

    async def readyz(self, request: Request) -> Response:
        is_ready = self._is_ready() and not self._stopping.is_set()
        return json_reply({"status": "ok" if is_ready else "not ready"}, {}, 200 if is_ready else 503)


def _question(dialect: Dialect, headers: Mapping[str, str], fields: Mapping[str, JSON], body: JSON) -> ParsedRequest:
    """With all that takes long where it is large. Raises ``Refusal``."""
    question = dialect.read(joined(body, fields), headers)
    try:
        said = tuple(of_messages(question.ask.messages))
    except (ValueError, TypeError, KeyError, RecursionError):  # whoever places it says why
        return question
    return replace(question, ask=replace(question.ask, said=said))


def user_of(body: Mapping[str, JSON]) -> str:
    """By the field that each dialect has for it."""
    metadata = body.get("metadata")
    named = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = (body.get(name) for name in ("safety_identifier", "user"))
    name = next((one for one in (*found, named) if isinstance(one, str)), "")
    return name[:MAX_USER_CHARS].encode("utf-8", "replace").decode()  # half a character cannot be stored


def _name_of(path: str) -> str:
    """Names the dialect."""
    return "gemini" if path == PREFIX else path.removeprefix("/v1/").replace("/", "_")


def _ignored(question: ParsedRequest, names: Sequence[str], left_out: Sequence[str] = ()) -> dict[str, str]:
    """Tells what the client asked for and the job decides, or has passed over."""
    passed_over = dict.fromkeys(without_index(one.param) for one in question.unsupported)
    volatile = [f"{VOLATILE}{name}" for name in left_out]
    ignored = [*question.ignored, *volatile, *passed_over, *(["model"] if question.model not in names else [])]
    told = list(dict.fromkeys(one if TELLABLE.fullmatch(one) else "unknown" for one in ignored))
    return {"x-gspo-ignored": ",".join([*told[:MAX_TOLD], *(["more"] if len(told) > MAX_TOLD else [])])} if told else {}


def _models_of_openai(names: Sequence[str]) -> JSON:
    return {"object": "list", "data": [_model_of_openai(name) for name in names]}


def _model_of_openai(name: str) -> JSON:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gspo"}


def _model_of_anthropic(name: str) -> JSON:
    known = {"display_name": name, "lifecycle": "active", "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "type": "model", **known}


def _model_of_gemini(name: str) -> JSON:
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "supportedGenerationMethods": [*VERBS],
    }


def _models_of_anthropic(names: Sequence[str]) -> JSON:
    models: list[JSON] = [_model_of_anthropic(name) for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
