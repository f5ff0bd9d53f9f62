"""Anthropic's Messages.

A stream is blocks, each opened, continued and closed by named events; its errors are events named ``error``. A message
of the user may hold results of tools, which become messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gspo_core.json_value import JSON
from gspo_core.messages import Message, MessageCall, ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.dialect import Fault, Heading, ParsedRequest, StreamState, event, spans
from services.gateway.dialects.fields import ANTHROPIC_MESSAGES
from services.gateway.dialects.openai_chat import arguments_text
from services.gateway.dialects.sent import FieldValue, Reader, ReadFields
from services.gateway.dialects.turns import AUTO, Answer, Finish, Piece, ToolChoice, Usage

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}
_CHOICES: Mapping[str, ToolChoice] = {"auto": AUTO, "none": ToolChoice("none"), "any": ToolChoice("required")}
_STOP_REASONS: Mapping[Finish, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# Required by the schema of this dialect; nothing of it is here.
_UNCOUNTED: Mapping[str, JSON] = dict.fromkeys(("cache_creation", "inference_geo", "service_tier"))


class AnthropicMessages:
    def __init__(self, *, counts: bool = False) -> None:
        """``counts``: requests ask for the size of a prompt, so they name no bound of an answer."""
        self._counts = counts

    def read(self, body: JSON, headers: Mapping[str, str]) -> ParsedRequest:
        reader, sent = Reader(ANTHROPIC_MESSAGES), FieldValue(body)
        taken = reader.take(sent)
        system, messages, sent_tools = taken.get("system"), taken.need("messages"), taken.get("tools")
        tools = asks.distinct(_tools(reader, sent_tools)) if sent_tools else []
        read: list[Message] = [{"role": "system", "content": asks.read_instructions(reader, system)}] if system else []
        for one in messages.items():
            read += _messages(reader, one)
        asks.not_empty(read[1:] if system else read, messages)
        if read[-1]["role"] == "assistant":
            raise messages.fault("end with words of the assistant, and the policy begins its turns itself")
        options, max_tokens = taken.get("output_config"), taken.get("max_tokens")
        if options is not None:
            reader.take(options)
        if max_tokens is None and not self._counts:
            max_tokens = taken.need("max_tokens")
        choice, is_single = _choice(reader, taken.get("tool_choice"), tools)
        ask = asks.make_ask(
            read,
            tools,
            choice,
            None if max_tokens is None else max_tokens.count(),
            asks.read_stop(taken.get("stop_sequences")),
            headers,
            taken.get("seed"),
            single_call=is_single and bool(tools),
        )
        stream = taken.get("stream")
        is_stream = stream is not None and stream.flag()
        return ParsedRequest(
            ask, taken.need("model").name(), is_stream, reader.ignored, sent.object(), reader.unsupported
        )

    def whole(self, question: ParsedRequest, model: str, answer: Answer) -> JSON:
        blocks: list[JSON] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.before:
            blocks.append(_text(answer.before))
        blocks += [_call(call_id, call.name, call.arguments) for call_id, call in answer.named_calls]
        if answer.behind:
            blocks.append(_text(answer.behind))
        return {
            **_message(answer.id, model, blocks, _usage(answer.usage)),
            **_end(answer),
            "policy_version": spans(answer.versions),
        }

    def writer(self, question: ParsedRequest, heading: Heading) -> MessagesWriter:
        return MessagesWriter(heading)

    def fault(self, fault: Fault) -> tuple[int, JSON]:
        status = 529 if fault.status == 503 else fault.status
        message = fault.message
        if fault.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients shorten their history when they read this
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        return status, {"type": "error", "error": {"type": kind, "message": message}}


class MessagesWriter:
    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._told = StreamState()
        self._num_blocks = 0
        self._open = ""
        """The type of the block that is not closed yet."""

    def begin(self) -> bytes:
        # Clients that keep an eye on their context read the prompt's size here. What was sampled comes at the end.
        begun = _usage(Usage(self._heading.num_prompt_tokens, 0, 0))
        message = _message(self._heading.id, self._heading.model, [], begun)
        return event({"type": "message_start", "message": message}, "message_start")

    def piece(self, piece: Piece) -> bytes:
        self._told.add(piece)
        out = b""
        if piece.reasoning:
            out += self._in_block({"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            out += self._text(piece.text)
        for call_id, call in piece.calls:
            out += self._in_block(_call(call_id, call.name, {}))
            out += self._delta({"type": "input_json_delta", "partial_json": arguments_text(call.arguments)})
            out += self._close()
        if piece.behind:
            out += self._text(piece.behind)
        return out

    def alive(self) -> bytes:
        return event({"type": "ping"}, "ping")

    def end(self, answer: Answer) -> bytes:
        out = self.piece(self._told.rest(answer)) + self._close()
        delta: JSON = {
            "type": "message_delta",
            "delta": _end(answer),
            "usage": _counts(answer.usage),
            "policy_version": spans(answer.versions),
        }
        return out + event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def fail(self, fault: Fault) -> bytes:
        return event(AnthropicMessages().fault(fault)[1], "error")

    def _text(self, text: str) -> bytes:
        return self._in_block(_text("")) + self._delta({"type": "text_delta", "text": text})

    def _in_block(self, block: dict[str, JSON]) -> bytes:
        if self._open == block["type"]:
            return b""
        out = self._close()
        self._open = str(block["type"])
        start: JSON = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return out + event(start, "content_block_start")

    def _delta(self, delta: JSON) -> bytes:
        return event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta}, "content_block_delta")

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = event({"type": "content_block_stop", "index": self._num_blocks}, "content_block_stop")
        self._open = ""
        self._num_blocks += 1
        return out


def _messages(reader: Reader, sent: FieldValue) -> list[Message]:
    taken = reader.take(sent)
    role, content = taken.need("role"), taken.need("content")
    if role.value == "assistant":
        return [_assistant(reader, content)]
    if role.value == "user":
        return _of_user(reader, content)
    if role.value == "system":
        return [{"role": "system", "content": asks.read_instructions(reader, content)}]
    raise role.fault("must be user, assistant or system")


def _of_user(reader: Reader, content: FieldValue) -> list[Message]:
    if isinstance(content.value, str):
        return [{"role": "user", "content": content.value}]
    messages: list[Message] = []
    for block in content.items():
        if block.object().get("type") == "tool_result":
            messages.append(_result(reader, block))
            continue
        text = asks.read_part(reader, block)
        before = messages[-1] if messages else None
        if before is not None and before["role"] == "user":
            before["content"] = f"{before.get('content')}{text}"
        else:
            messages.append({"role": "user", "content": text})
    return asks.not_empty(messages, content)


def _result(reader: Reader, block: FieldValue) -> Message:
    taken = reader.take(block)
    taken.need("type")
    call_id, content = taken.need("tool_use_id"), taken.get("content")
    taken.end("the result of a tool")
    text = "" if content is None else asks.read_text(reader, content)
    return {"role": "tool", "tool_call_id": call_id.name(), "content": text}


def _assistant(reader: Reader, content: FieldValue) -> Message:
    if isinstance(content.value, str):
        return {"role": "assistant", "content": content.value}
    texts, thoughts, calls = list[str](), list[str](), list[MessageCall]()
    for block in content.items():
        kind = block.object().get("type")
        if kind == "thinking":
            thoughts.append(_thought(reader.take(block)))
        elif kind == "tool_use":
            calls.append(_sent_call(reader.take(block)))
        else:
            texts.append(asks.read_part(reader, block))
    message: Message = {"role": "assistant", "content": "".join(texts) if texts else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _thought(taken: ReadFields) -> str:
    taken.need("type")
    thought = taken.need("thinking").text()
    taken.end("a thought")
    return thought


def _sent_call(taken: ReadFields) -> MessageCall:
    taken.need("type")
    read = asks.call(taken.need("id"), taken.need("name"), taken.need("input").value)
    taken.end("a call")
    return read


def _tools(reader: Reader, sent: FieldValue) -> Iterator[tuple[FieldValue, ToolSchema]]:
    """Those that the agent runs itself; what runs at a provider is left out, and the answer says so."""
    for one in sent.items():
        if (kind := one.object().get("type")) in (None, "custom"):
            yield one, _tool(reader, one)
        elif isinstance(kind, str):
            reader.ignore(f"tools.{kind}")
        else:
            raise one.fault("must have a text as its type")


def _tool(reader: Reader, sent: FieldValue) -> ToolSchema:
    taken = reader.take(sent)
    taken.get("type")
    return asks.tool(taken.need("name"), taken.get("description"), taken.need("input_schema"))


def _choice(reader: Reader, sent: FieldValue | None, tools: Sequence[ToolSchema]) -> tuple[ToolChoice, bool]:
    """Also whether one call ends the turn."""
    if sent is None:
        return AUTO, False
    taken = reader.take(sent)
    single = taken.get("disable_parallel_tool_use")
    kind, name = taken.need("type"), taken.get("name")
    if kind.value == "tool":
        choice = ToolChoice("required", (name or taken.need("name")).name())
    elif kind.text() in _CHOICES:
        choice = _CHOICES[kind.text()]
    else:
        raise kind.fault("must be auto, any, tool or none")
    return asks.choose(sent, choice, tools), single is not None and single.flag()


def _call(call_id: str, name: str | None, arguments: JSON) -> dict[str, JSON]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _text(text: str) -> dict[str, JSON]:
    return {"type": "text", "text": text, "citations": None}


def _message(message_id: str, model: str, blocks: list[JSON], usage: JSON) -> dict[str, JSON]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": usage,
    }


def _end(answer: Answer) -> dict[str, JSON]:
    if answer.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}


def _usage(usage: Usage) -> JSON:
    return {**_counts(usage), **_UNCOUNTED}


def _counts(usage: Usage) -> dict[str, JSON]:
    """The three counts of the prompt add up to it."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_stored_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_stored_tokens,
        "output_tokens": usage.num_sampled_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        "server_tool_use": None,
    }
