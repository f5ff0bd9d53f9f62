"""OpenAI's Chat Completions.

A stream is chunks of one completion, then ``[DONE]``; its errors are chunks with a field ``error``. Reasoning is told
as ``reasoning_content``, as other servers of open models do, and a stop text that ended the turn as ``stop_reason``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gspo_core.json_value import JSON
from gspo_core.messages import Message, MessageCall, ToolCall, ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.dialect import COMMENT, Fault, Heading, ParsedRequest, StreamState, event, spans
from services.gateway.dialects.fields import OPENAI_CHAT
from services.gateway.dialects.sent import FieldValue, Reader, ReadFields
from services.gateway.dialects.tool_forms import Form, Forms, arguments_of, form_of, text_tool, told_id, told_text
from services.gateway.dialects.turns import AUTO, Answer, Piece, ToolChoice, Usage

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "unavailable_error",
}


class OpenAIChat:
    def read(self, body: JSON, headers: Mapping[str, str]) -> ParsedRequest:
        reader, sent = Reader(OPENAI_CHAT), FieldValue(body)
        taken = reader.take(sent)
        messages = taken.need("messages")
        read = [_message(reader, one) for one in messages.items()]
        sent_tools = taken.get("tools")
        forms: dict[str, Form] = {}
        tools = asks.distinct((one, _tool(reader, one, forms)) for one in sent_tools.items()) if sent_tools else []
        ask = asks.make_ask(
            asks.not_empty(read, messages),
            tools,
            _choice(reader, taken.get("tool_choice"), tools),
            _max_tokens(taken),
            asks.read_stop(taken.get("stop")),
            headers,
            taken.get("seed"),
            single_call=asks.is_single(taken.get("parallel_tool_calls")) and bool(tools),
        )
        stream = taken.get("stream")
        return ParsedRequest(
            ask=ask,
            model=taken.need("model").name(),
            is_stream=stream is not None and stream.flag(),
            ignored=reader.ignored,
            body=sent.object(),
            wants_usage=_wants_usage(reader, taken.get("stream_options")),
            unsupported=reader.unsupported,
            forms=forms,
        )

    def whole(self, question: ParsedRequest, model: str, answer: Answer) -> JSON:
        message: dict[str, JSON] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_told_call(*one, question.forms) for one in answer.named_calls]
            message["content"] = answer.text or None
        choice: JSON = {"index": 0, "message": message, "logprobs": None, **_end(answer)}
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created_at,
            "model": model,
            "choices": [choice],
            "usage": _usage(answer.usage),
            "policy_version": spans(answer.versions),
        }

    def writer(self, question: ParsedRequest, heading: Heading) -> ChatWriter:
        return ChatWriter(heading, question.forms, wants_usage=question.wants_usage)

    def fault(self, fault: Fault) -> tuple[int, JSON]:
        return fault.status, {"error": error(fault)}


class ChatWriter:
    def __init__(self, heading: Heading, forms: Forms, *, wants_usage: bool) -> None:
        self._heading = heading
        self._forms = forms
        self._wants_usage = wants_usage
        self._told = StreamState()
        self._num_calls = 0

    def begin(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        self._told.add(piece)
        out = b""
        if piece.reasoning:
            out += self._delta({"reasoning_content": piece.reasoning})
        if piece.text:
            out += self._delta({"content": piece.text})
        for call_id, call in piece.calls:
            told = _told_call(call_id, call, self._forms)
            out += self._delta({"tool_calls": [{"index": self._num_calls, **told}]})
            self._num_calls += 1
        if piece.behind:
            out += self._delta({"content": piece.behind})
        return out

    def alive(self) -> bytes:
        return COMMENT

    def end(self, answer: Answer) -> bytes:
        out = self.piece(self._told.rest(answer))
        out += self._chunk([{"index": 0, "delta": {}, "logprobs": None, **_end(answer)}], answer)
        if self._wants_usage:
            out += self._chunk([], answer, usage=_usage(answer.usage))
        return out + b"data: [DONE]\n\n"

    def fail(self, fault: Fault) -> bytes:
        return event({"error": error(fault)})

    def _delta(self, delta: dict[str, JSON]) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk(self, choices: list[JSON], answer: Answer | None = None, usage: JSON = None) -> bytes:
        chunk: dict[str, JSON] = {
            "id": self._heading.id,
            "object": "chat.completion.chunk",
            "created": self._heading.created_at,
            "model": self._heading.model,
            "choices": choices,
        }
        if self._wants_usage:
            chunk["usage"] = usage
        if answer is not None:
            chunk["policy_version"] = spans(answer.versions)
        return event(chunk)


def error(fault: Fault) -> dict[str, JSON]:
    """An error as both dialects of OpenAI have it."""
    return {
        "message": fault.message,
        "type": ERROR_TYPES.get(fault.status, "invalid_request_error"),
        "param": fault.param or None,
        "code": fault.code,
    }


def arguments_text(arguments: JSON) -> str:
    return msgspec.json.encode(arguments).decode()


def _max_tokens(taken: ReadFields) -> int | None:
    old, new = taken.get("max_tokens"), taken.get("max_completion_tokens")
    if old is not None and new is not None and old.count() != new.count():
        raise old.fault("and max_completion_tokens say different numbers")
    bound = new or old
    return None if bound is None else bound.count()


def _wants_usage(reader: Reader, options: FieldValue | None) -> bool:
    wanted = None if options is None else reader.take(options).get("include_usage")
    return wanted is not None and wanted.flag()


def _message(reader: Reader, sent: FieldValue) -> Message:
    taken = reader.take(sent)
    role = taken.need("role")
    name = taken.get("name")
    if role.value == "assistant":
        message = _assistant(reader, taken)
    elif role.value == "tool":
        message = {"role": "tool", "tool_call_id": taken.need("tool_call_id").name()}
        message["content"] = asks.read_text(reader, taken.need("content"))
    elif role.value in ("system", "developer", "user"):
        is_users = role.value == "user"
        read = asks.read_text if is_users else asks.read_instructions
        message = {"role": "user" if is_users else "system", "content": read(reader, taken.need("content"))}
    else:
        raise role.fault("must be system, developer, user, assistant or tool")
    if name is not None and role.value == "tool":
        message["name"] = name.text()
    elif name is not None:
        reader.ignore(name.place)
    taken.end(f"a message of {role.value}")
    return message


def _assistant(reader: Reader, taken: ReadFields) -> Message:
    content, calls = taken.get("content"), taken.get("tool_calls")
    message: Message = {"role": "assistant", "content": None if content is None else asks.read_text(reader, content)}
    reasoning = _reasoning(reader, taken)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls is not None and calls.value:
        message["tool_calls"] = [_call(reader, one) for one in calls.items()]
    return message


def _reasoning(reader: Reader, taken: ReadFields) -> str:
    """It comes back under the name that a client or its proxy prefers, sometimes under several."""
    details = taken.get("reasoning_details")
    plain = [one.text() for one in (taken.get("reasoning_content"), taken.get("reasoning")) if one is not None]
    if details is not None:
        plain.append("".join(asks.read_part(reader, one) for one in details.items()))
    return next(filter(None, plain), "")


def _call(reader: Reader, sent: FieldValue) -> MessageCall:
    taken = reader.take(sent)
    call_id, kind = taken.need("id"), taken.get("type")
    if kind is not None and kind.value == "custom":
        custom = reader.take(taken.need("custom"))
        taken.end("a call of a custom tool")
        return asks.call(call_id, custom.need("name"), arguments_of(call_id, custom.need("input")))
    if kind is not None and kind.value != "function":
        raise kind.fault("must be function or custom")
    function = reader.take(taken.need("function"))
    taken.end("a call of a function")
    return asks.call(call_id, function.need("name"), asks.parsed(function.need("arguments")))


def _tool(reader: Reader, sent: FieldValue, forms: dict[str, Form]) -> ToolSchema:
    kind = sent.object().get("type")
    if kind not in (None, "function", "custom"):
        raise sent.fault(f"is of type {kind}: there are no other tools than functions and custom ones here")
    taken = reader.take(sent)
    taken.need("type")
    if kind == "custom":
        custom = reader.take(taken.need("custom"))
        form = Form(custom.need("name").name(), is_text=True)
        forms[form.full_name] = form
        taken.end("a custom tool")
        return text_tool(reader, custom, form)
    function = reader.take(taken.need("function"))
    taken.end("a function")
    return asks.tool(function.need("name"), function.get("description"), function.get("parameters"))


def _choice(reader: Reader, sent: FieldValue | None, tools: Sequence[ToolSchema]) -> ToolChoice:
    if sent is None:
        return AUTO
    if isinstance(sent.value, str):
        return asks.choose(sent, said_choice(sent), tools)
    kind = needs_tool(sent)
    taken = reader.take(sent)
    taken.need("type")
    named = reader.take(taken.need(kind))
    taken.end(f"a choice of type {kind}")
    return asks.choose(sent, ToolChoice("required", named.need("name").name()), tools)


def said_choice(sent: FieldValue) -> ToolChoice:
    """A choice in one word, as both dialects of OpenAI have it."""
    if sent.value == "none":
        return ToolChoice("none")
    if sent.value == "required":
        return ToolChoice("required")
    if sent.value != "auto":
        raise sent.fault("must be auto, none, required or a function")
    return AUTO


def needs_tool(sent: FieldValue) -> str:
    """The kind of the tool that is to be called; of the other kinds of choices, none can be acted on."""
    kind = sent.object().get("type")
    if kind not in ("function", "custom"):
        raise sent.fault(f"is of type {kind}, which cannot be acted on: it may be auto, none, required or a tool")
    return str(kind)


def _end(answer: Answer) -> dict[str, JSON]:
    """``stop_reason`` is the stop text that ended the turn, as other servers of open models have it."""
    end: dict[str, JSON] = {"finish_reason": answer.finish}
    return end | {"stop_reason": answer.stop_text} if answer.stop_text else end


def _told_call(call_id: str, call: ToolCall, forms: Forms) -> dict[str, JSON]:
    form = form_of(forms, call.name)
    if form.is_text:
        custom: JSON = {"name": form.name, "input": told_text(call.arguments)}
        return {"id": told_id(call_id, call.arguments, form), "type": "custom", "custom": custom}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments_text(call.arguments)},
    }


def _usage(usage: Usage) -> JSON:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_sampled_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_stored_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }
