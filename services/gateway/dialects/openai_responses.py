"""OpenAI's Responses, without a memory: every request holds the whole conversation.

The input is items: the reasoning, text and calls of one turn are items of their own, which are put together here. A
stream tells each item from its opening to its end; a repeated ``response.in_progress`` is its sign of life, since
comments reset no timer of clients that count events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolCall, ToolSchema
from services.gateway.dialects import asks
from services.gateway.dialects.dialect import Fault, Heading, ParsedRequest, StreamState, event, spans
from services.gateway.dialects.fields import OPENAI_RESPONSES
from services.gateway.dialects.openai_chat import arguments_text, error, needs_tool, said_choice
from services.gateway.dialects.sent import FieldValue, Reader, ReadFields
from services.gateway.dialects.tool_forms import (
    Form,
    Forms,
    arguments_of,
    form_of,
    joined,
    text_tool,
    told_id,
    told_text,
)
from services.gateway.dialects.turns import AUTO, Answer, Piece, ToolChoice, Usage

# Types of tools that run at the provider.
LEFT_OUT = frozenset(
    {"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "computer_use_preview"}
)


class OpenAIResponses:
    def read(self, body: JSON, headers: Mapping[str, str]) -> ParsedRequest:
        reader, sent = Reader(OPENAI_RESPONSES), FieldValue(body)
        taken = reader.take(sent)
        instructions, given, tools = taken.get("instructions"), taken.need("input"), taken.get("tools")
        conversation = _Conversation(reader)
        if isinstance(given.value, str):
            conversation.messages.append({"role": "user", "content": given.value})
        else:
            for item in given.items():
                conversation.add(item)
        messages = asks.not_empty(conversation.messages, given)
        if instructions is not None:
            messages.insert(0, {"role": "system", "content": asks.stable(reader, [instructions.text()])})
        options, max_tokens, stream = taken.get("text"), taken.get("max_output_tokens"), taken.get("stream")
        if options is not None:
            reader.take(options)
        forms: dict[str, Form] = {}
        functions = asks.distinct(_tools(reader, tools, forms)) if tools else []
        ask = asks.make_ask(
            messages,
            functions,
            _choice(reader, taken.get("tool_choice"), functions),
            None if max_tokens is None else max_tokens.count(),
            [],
            headers,
            taken.get("seed"),
            single_call=asks.is_single(taken.get("parallel_tool_calls")) and bool(functions),
        )
        is_stream = stream is not None and stream.flag()
        return ParsedRequest(
            ask, taken.need("model").name(), is_stream, reader.ignored, sent.object(), reader.unsupported, forms
        )

    def whole(self, question: ParsedRequest, model: str, answer: Answer) -> JSON:
        return _response(question, Heading(answer.id, answer.created_at, model, answer.usage.num_prompt_tokens), answer)

    def writer(self, question: ParsedRequest, heading: Heading) -> ResponsesWriter:
        return ResponsesWriter(question, heading)

    def fault(self, fault: Fault) -> tuple[int, JSON]:
        return fault.status, {"error": _error(fault)}


# What an episode refuses by the name that other dialects have for it.
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}


def _error(fault: Fault) -> JSON:
    return error(replace(fault, param=_PARAMS.get(fault.param, fault.param)))


# What a call says, by the type of its item: the name of the field, and of its events.
_SAID = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)


class ResponsesWriter:
    def __init__(self, question: ParsedRequest, heading: Heading) -> None:
        self._question = question
        self._heading = heading
        self._told = StreamState()
        self._num_events = 0
        self._num_items = 0
        self._num_calls = 0
        self._open: _Part | None = None

    def begin(self) -> bytes:
        return self._lifecycle("created") + self._lifecycle("in_progress")

    def piece(self, piece: Piece) -> bytes:
        self._told.add(piece)
        out = b""
        if piece.reasoning:
            out += self._continue("reasoning", piece.reasoning)
        if piece.text:
            out += self._continue("message", piece.text)
        for call_id, call in piece.calls:
            item = _call_item(f"{self._heading.id}_{self._num_calls}", call_id, call, self._question.forms)
            out += self._close("completed") + self._tell_call(item)
            self._num_calls += 1
        if piece.behind:
            out += self._continue("message", piece.behind)
        return out

    def alive(self) -> bytes:
        return self._lifecycle("in_progress")

    def end(self, answer: Answer) -> bytes:
        out = self.piece(self._told.rest(answer))
        if not answer.text and not answer.calls:
            out += self._continue("message", "")
        # Reasoning is always followed by another item, so it is never what was cut off.
        out += self._close("completed" if self._open and self._open.kind == "reasoning" else _status(answer))
        whole = _response(self._question, self._heading, answer)
        return out + self._event(f"response.{whole['status']}", {"response": whole})

    def fail(self, fault: Fault) -> bytes:
        response = _response(self._question, self._heading, None)
        response["status"] = "failed"
        response["error"] = {"code": fault.code, "message": fault.message}
        # Some clients look for the one, some for the other.
        return self._event("response.failed", {"response": response, "error": _error(fault)})

    def _lifecycle(self, state: str) -> bytes:
        return self._event(f"response.{state}", {"response": _response(self._question, self._heading, None)})

    def _continue(self, kind: str, text: str) -> bytes:
        """More of the item of this kind, opened if need be."""
        out = b""
        if self._open is None or self._open.kind != kind:
            out += self._close("completed")
            self._open = _Part(kind, self._heading.id, is_behind=self._num_calls > 0)
            added: dict[str, JSON] = {"output_index": self._num_items, "item": self._open.item("in_progress")}
            out += self._event("response.output_item.added", added)
            out += self._of_part("response.content_part.added", {"part": self._open.content()})
        self._open.text += text
        if text:
            out += self._of_part(f"{self._open.event}.delta", {"delta": text})
        return out

    def _close(self, status: str) -> bytes:
        part = self._open
        if part is None:
            return b""
        out = self._of_part(f"{part.event}.done", {"text": part.text})
        out += self._of_part("response.content_part.done", {"part": part.content()})
        done: dict[str, JSON] = {"output_index": self._num_items, "item": part.item(status)}
        out += self._event("response.output_item.done", done)
        self._open = None
        self._num_items += 1
        return out

    def _tell_call(self, item: dict[str, JSON]) -> bytes:
        place: dict[str, JSON] = {"output_index": self._num_items}
        of_item = place | {"item_id": item["id"]}
        name, event = _SAID[str(item["type"])]
        begun = item | {name: ""} | ({"status": "in_progress"} if "status" in item else {})
        done = {name: item[name]} | ({"name": item["name"]} if name == "arguments" else {})
        self._num_items += 1
        return (
            self._event("response.output_item.added", place | {"item": begun})
            + self._event(f"response.{event}.delta", of_item | {"delta": item[name]})
            + self._event(f"response.{event}.done", of_item | done)
            + self._event("response.output_item.done", place | {"item": item})
        )

    def _of_part(self, kind: str, fields: dict[str, JSON]) -> bytes:
        assert self._open is not None
        place: dict[str, JSON] = {"item_id": self._open.id, "output_index": self._num_items, "content_index": 0}
        if kind.startswith("response.output_text"):
            place["logprobs"] = []
        return self._event(kind, place | fields)

    def _event(self, kind: str, fields: dict[str, JSON]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class _Part:
    """An item that holds one text, while it grows."""

    def __init__(self, kind: str, turn: str, text: str = "", *, is_behind: bool = False) -> None:
        self.kind = kind
        self.text = text
        self.id = f"rs_{turn}" if kind == "reasoning" else f"msg_{turn}_behind" if is_behind else f"msg_{turn}"
        self.event = "response.reasoning_text" if kind == "reasoning" else "response.output_text"

    def content(self) -> JSON:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> dict[str, JSON]:
        content: list[JSON] = [] if status == "in_progress" else [self.content()]
        item: dict[str, JSON] = {"id": self.id, "type": self.kind, "status": status, "content": content}
        if self.kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        return item


class _Conversation:
    """Items put together to messages."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The turn of the assistant that further items may belong to."""

    def add(self, item: FieldValue) -> None:
        kind = item.object().get("type", "message")
        if kind not in _ITEMS:
            raise item.fault(f"is of type {kind}, which cannot be acted on here")
        taken = self._reader.take(item)
        taken.get("type")
        if kind == "message":
            self._message(taken)
        elif kind == "reasoning":
            self._reasoning(taken)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(taken, is_text=kind == "custom_tool_call")
        else:
            self._result(taken)
        taken.end(f"an item of type {kind}")

    def _message(self, taken: ReadFields) -> None:
        role = taken.need("role")
        read = asks.read_instructions if role.value in ("system", "developer") else asks.read_text
        text = read(self._reader, taken.need("content"))
        if role.value == "assistant":
            turn = self._turn
            if turn is not None and "tool_calls" in turn:  # no result of a call stands between them
                turn["content"] = f"{turn.get('content') or ''}{text}"
                return
            if turn is None or turn.get("content") is not None:
                turn = self._begin_turn()
            turn["content"] = text
        elif role.value in ("system", "developer", "user"):
            self._turn = None
            self.messages.append({"role": "user" if role.value == "user" else "system", "content": text})
        else:
            raise role.fault("must be system, developer, user or assistant")

    def _reasoning(self, taken: ReadFields) -> None:
        content, summary = taken.get("content"), taken.get("summary")
        told = content if content is not None and content.value else summary
        text = "" if told is None else asks.read_text(self._reader, told)
        turn = self._begin_turn()
        if text:
            turn["reasoning_content"] = text

    def _call(self, taken: ReadFields, *, is_text: bool) -> None:
        turn = self._turn if self._turn is not None else self._begin_turn()
        call_id, name, namespace = taken.need("call_id"), taken.need("name"), taken.get("namespace")
        arguments = arguments_of(call_id, taken.need("input")) if is_text else asks.parsed(taken.need("arguments"))
        if namespace is not None:
            name = FieldValue(joined(namespace.name(), name.name()), name.place)
        turn["tool_calls"] = [*turn.get("tool_calls", ()), asks.call(call_id, name, arguments)]

    def _result(self, taken: ReadFields) -> None:
        self._turn = None
        call_id, output = taken.need("call_id"), taken.need("output")
        text = asks.read_text(self._reader, output)
        result: Message = {"role": "tool", "tool_call_id": call_id.name(), "content": text}
        name = taken.get("name")
        if name is not None:
            result["name"] = name.text()
        self.messages.append(result)

    def _begin_turn(self) -> Message:
        self._turn = {"role": "assistant", "content": None}
        self.messages.append(self._turn)
        return self._turn


def _tools(reader: Reader, sent: FieldValue, forms: dict[str, Form]) -> Iterator[tuple[FieldValue, ToolSchema]]:
    """Functions, also those of namespaces, and tools of one text, as functions; what runs at a provider is left out,
    and the answer says so."""
    for one in sent.items():
        kind = one.object().get("type")
        if kind == "namespace":
            yield from _named_together(reader, one, forms)
        elif kind in ("function", "custom"):
            yield one, _tool(reader, one, forms)
        elif isinstance(kind, str) and kind in LEFT_OUT:
            reader.ignore(f"tools.{kind}")
        else:
            raise one.fault(f"is of type {kind}: there are no other tools than functions and custom ones here")


def _named_together(
    reader: Reader, sent: FieldValue, forms: dict[str, Form]
) -> Iterator[tuple[FieldValue, ToolSchema]]:
    taken = reader.take(sent)
    namespace = taken.need("name").name()
    taken.need("type")
    description = taken.get("description")
    if description is not None and description.text():
        reader.ignore("tools.namespace.description")
    tools = taken.need("tools").items()
    taken.end("a namespace")
    for one in tools:
        if (kind := one.object().get("type")) not in ("function", "custom"):
            raise one.fault(f"is of type {kind}: there are functions and custom tools in a namespace here")
        yield one, _tool(reader, one, forms, namespace)


def _tool(reader: Reader, sent: FieldValue, forms: dict[str, Form], namespace: str = "") -> ToolSchema:
    taken = reader.take(sent)
    kind, name = taken.need("type"), taken.need("name")
    form = Form(name.name(), namespace, is_text=kind.value == "custom")
    if form.is_text or namespace:
        forms[form.full_name] = form
    if form.is_text:
        tool = text_tool(reader, taken, form)
    else:
        tool = asks.tool(FieldValue(form.full_name, name.place), taken.get("description"), taken.get("parameters"))
    taken.end(f"a tool of type {kind.value}")
    return tool


def _choice(reader: Reader, sent: FieldValue | None, tools: Sequence[ToolSchema]) -> ToolChoice:
    if sent is None:
        return AUTO
    if isinstance(sent.value, str):
        return asks.choose(sent, said_choice(sent), tools)
    needs_tool(sent)
    return asks.choose(sent, ToolChoice("required", reader.take(sent).need("name").name()), tools)


# Required by a schema of this dialect, with the value of what is not there.
_SCHEMAS_FIELDS: Mapping[str, JSON] = {
    "background": False,
    "completed_at": None,
    "frequency_penalty": 0,
    "max_tool_calls": None,
    "presence_penalty": 0,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": None,
    "top_logprobs": 0,
}


def _response(question: ParsedRequest, heading: Heading, answer: Answer | None) -> dict[str, JSON]:
    """The response; without an answer, one that is in progress."""
    body = question.body
    response: dict[str, JSON] = {
        "id": heading.id,
        "object": "response",
        "created_at": heading.created_at,
        "status": "in_progress" if answer is None else _status(answer),
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": heading.model,
        "output": [],
        "parallel_tool_calls": not question.ask.single_call,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
        **_SCHEMAS_FIELDS,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
    }
    if answer is not None:
        response["output"] = _output(answer, question.forms)
        response["usage"] = _usage(answer.usage)
        response["policy_version"] = spans(answer.versions)
        if answer.finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


def _output(answer: Answer, forms: Forms) -> list[JSON]:
    items: list[JSON] = []
    if answer.reasoning:
        items.append(_Part("reasoning", answer.id, answer.reasoning).item("completed"))
    if answer.before or not answer.calls:
        # Before a call it is whole, wherever the answer was cut off.
        items.append(_Part("message", answer.id, answer.before).item("completed" if answer.calls else _status(answer)))
    items += [_call_item(f"{answer.id}_{index}", *one, forms) for index, one in enumerate(answer.named_calls)]
    if answer.behind:
        items.append(_Part("message", answer.id, answer.behind, is_behind=True).item(_status(answer)))
    return items


def _call_item(place: str, call_id: str, call: ToolCall, forms: Forms) -> dict[str, JSON]:
    form = form_of(forms, call.name)
    item: dict[str, JSON] = {"call_id": told_id(call_id, call.arguments, form), "name": form.name}
    if form.namespace:
        item["namespace"] = form.namespace
    if form.is_text:
        return {"id": f"ctc_{place}", "type": "custom_tool_call", **item, "input": told_text(call.arguments)}
    arguments = arguments_text(call.arguments)
    return {"id": f"fc_{place}", "type": "function_call", "status": "completed", **item, "arguments": arguments}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_stored_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_sampled_tokens,
    }
