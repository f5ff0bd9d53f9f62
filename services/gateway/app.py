"""The routes of the gateway: what agents speak to, given a base URL and the key of an episode.

Rule: a request is answered in the shape of the dialect that its path belongs to, errors included. What an episode does
with a request is not known here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gspo_core.json_value import JSON
from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.dialect import Dialect, Question
from services.gateway.dialects.fields import EPISODE
from services.gateway.dialects.openai_chat import OpenAIChat
from services.gateway.dialects.openai_responses import OpenAIResponses
from services.gateway.dialects.sent import Reader, Sent
from services.gateway.requests import BodyTooLarge, RequestMiddleware, key_of, read_json, refused
from services.gateway.streams import Pace, Reply, json_reply
from services.gateway.turns import Refusal, Turns

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": AnthropicMessages(),
}
_COUNTING = AnthropicMessages(counts=True)


def build_app(
    turns: Turns, *, is_ready: Callable[[], bool], stopping: asyncio.Event, pace: Pace | None = None
) -> Starlette:
    """``stopping`` is set when the process is asked to leave: who waits for an answer is then sent elsewhere."""
    routes = _Routes(turns, is_ready, stopping, pace or Pace())
    table = [
        *(Route(path, routes.turn, methods=["POST"]) for path in DIALECTS),
        Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/episode/reward", routes.reward, methods=["POST"]),
        Route("/v1/episode/finish", routes.finish, methods=["POST"]),
        Route("/healthz", routes.healthz, methods=["GET"]),
        Route("/readyz", routes.readyz, methods=["GET"]),
    ]
    app = Starlette(
        routes=table,
        middleware=[Middleware(RequestMiddleware, paths=frozenset(route.path for route in table))],
        exception_handlers={HTTPException: refused, Refusal: refused, BodyTooLarge: refused},
    )
    # Another spelling of a path would be redirected, and a redirected request loses its body in some clients.
    app.router.redirect_slashes = False
    return app


class _Routes:
    def __init__(self, turns: Turns, is_ready: Callable[[], bool], stopping: asyncio.Event, pace: Pace) -> None:
        self._turns = turns
        self._is_ready = is_ready
        self._stopping = stopping
        self._pace = pace

    async def turn(self, request: Request) -> Reply:
        dialect, key = DIALECTS[request.url.path], key_of(request.headers)
        # Before the body is read: without a key, nothing is.
        names = await self._turns.model_names(key)
        question = dialect.read(await read_json(request), request.headers)
        answering = await self._turns.ask(key, question.ask)
        model = question.model if question.model in names else names[0]
        headers = _ignored(question, names)
        return Reply(dialect, question, model, answering, headers, self._stopping, self._pace)

    async def count_tokens(self, request: Request) -> Response:
        key = key_of(request.headers)
        names = await self._turns.model_names(key)
        question = _COUNTING.read(await read_json(request), request.headers)
        count = await self._turns.count_tokens(key, question.ask)
        return json_reply({"input_tokens": count}, _ignored(question, names))

    async def models(self, request: Request) -> Response:
        names = await self._turns.model_names(key_of(request.headers))
        in_anthropics_shape = "anthropic-version" in request.headers
        return json_reply(_models_of_anthropic(names) if in_anthropics_shape else _models_of_openai(names), {})

    async def reward(self, request: Request) -> Response:
        key, sent = key_of(request.headers), Sent(await read_json(request))
        taken = Reader(EPISODE).take(sent)
        reward, turn, token = taken.need("reward"), taken.get("turn"), taken.get("token")
        value = reward.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise reward.fault("must be a finite number")
        turn_id = "" if turn is None else turn.name()
        token_text = request.headers.get("idempotency-key", "") if token is None else token.name()
        await self._turns.reward(key, float(value), turn=turn_id, token=token_text)
        return json_reply({"reward": float(value), "turn": turn_id or None}, {})

    async def finish(self, request: Request) -> Response:
        key = key_of(request.headers)
        await self._turns.finish(key)
        return json_reply({"finished": True}, {})

    async def healthz(self, request: Request) -> Response:
        return json_reply({"status": "ok"}, {})

    async def readyz(self, request: Request) -> Response:
        is_ready = self._is_ready() and not self._stopping.is_set()
        return json_reply({"status": "ok" if is_ready else "not ready"}, {}, 200 if is_ready else 503)


def _ignored(question: Question, names: Sequence[str]) -> dict[str, str]:
    """Tells what the client asked for and the job decides."""
    ignored = [*question.ignored, *(["model"] if question.model not in names else [])]
    return {"x-gspo-ignored": ",".join(ignored)} if ignored else {}


def _models_of_openai(names: Sequence[str]) -> JSON:
    models: list[JSON] = [{"id": name, "object": "model", "created": 0, "owned_by": "gspo"} for name in names]
    return {"object": "list", "data": models}


def _models_of_anthropic(names: Sequence[str]) -> JSON:
    models: list[JSON] = [
        {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"} for name in names
    ]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
