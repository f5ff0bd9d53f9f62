"""Clients of the tests, one a dialect: each writes a conversation and reads an answer, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from gspo_core.messages import Message, ToolSchema
from gspo_core.strict_json import parse
from services.gateway.dialects.turns import AUTO, ToolChoice
from tests.services.gateway.fake_turns import KEY, MODEL

Wire = dict[str, Any]


@dataclass
class Said:
    """An answer as a client of any dialect understands it."""

    id: str = ""
    model: str = ""
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    finish: str = ""
    stop_text: str = ""
    prompt: int = 0
    stored: int = 0
    sampled: int = 0
    versions: list[dict[str, int]] = field(default_factory=list)


class Speaker(Protocol):
    path: str
    has_stop: bool
    headers: dict[str, str]

    def url(self, body: Wire) -> str:
        """Where this request is sent."""
        ...

    def with_option(self, body: Wire, name: str, value: Any) -> Wire:
        """A request that says so too how to sample, by the name that most dialects have for it."""
        ...

    def body(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        choice: ToolChoice = AUTO,
    ) -> Wire: ...

    def read(self, body: Wire) -> Said: ...

    def read_stream(self, stream: str) -> Said: ...

    def error(self, body: Wire) -> str:
        """The message of an error, once its shape is known to be right."""
        ...


def events(stream: str) -> Iterator[tuple[str, Wire]]:
    """Every event of a stream that ended whole, with its name; comments and the end of OpenAI's are left out."""
    assert stream.endswith("\n\n"), stream[-80:]
    for block in filter(None, stream.strip().split("\n\n")):
        if block.startswith('{"error":'):  # as Google's packages look for it
            yield "error", parse(block)  # type: ignore[misc]
            continue
        lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        assert set(fields) <= {"event", "data"}, block
        if fields and fields["data"] != "[DONE]":
            data = parse(fields["data"])
            assert isinstance(data, dict)
            yield fields.get("event", ""), data


class AtOnePath:
    path: str

    def url(self, body: Wire) -> str:
        return self.path

    def with_option(self, body: Wire, name: str, value: Any) -> Wire:
        return {**body, name: value}


class Chat(AtOnePath):
    path = "/v1/chat/completions"
    has_stop = True

    def __init__(self) -> None:
        self.headers = {"authorization": f"Bearer {KEY}"}

    def body(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        choice: ToolChoice = AUTO,
    ) -> Wire:
        more: Wire = {"max_completion_tokens": max_tokens} if max_tokens else {}
        more |= {"tools": list(tools)} if tools else {}
        more |= {"stop": list(stop)} if stop else {}
        if choice != AUTO:
            named = {"type": "function", "function": {"name": choice.name}}
            more["tool_choice"] = named if choice.name else choice.mode
        return {"model": MODEL, "messages": [self._message(one) for one in messages], **more}

    def _message(self, message: Message) -> Wire:
        sent: Wire = {**message}
        if message.get("tool_calls"):
            sent["tool_calls"] = [
                {**one, "function": {"name": one["function"]["name"], "arguments": _text(one["function"]["arguments"])}}
                for one in message["tool_calls"]
            ]
        return sent

    def read(self, body: Wire) -> Said:
        (choice,) = body["choices"]
        message = choice["message"]
        assert (body["object"], choice["index"], message["role"]) == ("chat.completion", 0, "assistant")
        said = Said(body["id"], body["model"], message["content"] or "", message.get("reasoning_content", ""))
        for one in message.get("tool_calls", []):
            assert one["type"] == "function"
            said.calls.append((one["id"], one["function"]["name"], json.loads(one["function"]["arguments"])))
        said.finish = choice["finish_reason"]
        said.stop_text = choice.get("stop_reason", "")
        said.versions = body["policy_version"]
        _count_openai(said, body["usage"])
        return said

    def read_stream(self, stream: str) -> Said:
        assert stream.rstrip().endswith("data: [DONE]")
        said = Said()
        names: dict[int, Wire] = {}
        for name, chunk in events(stream):
            assert (name, chunk["object"]) == ("", "chat.completion.chunk")
            assert said.id in ("", chunk["id"])
            said.id, said.model = chunk["id"], chunk["model"]
            said.versions = chunk.get("policy_version", said.versions)
            if chunk.get("usage"):
                assert chunk["choices"] == []
                _count_openai(said, chunk["usage"])
                continue
            (choice,) = chunk["choices"]
            assert not said.finish
            said.finish = choice["finish_reason"] or ""
            said.stop_text = choice.get("stop_reason", "")
            delta = choice["delta"]
            said.text += delta.get("content") or ""
            said.reasoning += delta.get("reasoning_content") or ""
            for one in delta.get("tool_calls", []):
                known = names.setdefault(one["index"], {"arguments": ""})
                known |= {"id": one.get("id"), "name": one["function"].get("name")} if "id" in one else {}
                known["arguments"] += one["function"]["arguments"]
        assert list(names) == list(range(len(names)))
        said.calls = [(one["id"], one["name"], json.loads(one["arguments"])) for one in names.values()]
        return said

    def error(self, body: Wire) -> str:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return str(body["error"]["message"])


class Responses(AtOnePath):
    path = "/v1/responses"
    has_stop = False

    def __init__(self) -> None:
        self.headers = {"authorization": f"Bearer {KEY}"}

    def body(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        choice: ToolChoice = AUTO,
    ) -> Wire:
        assert not stop
        more: Wire = {"max_output_tokens": max_tokens} if max_tokens else {}
        if tools:
            more["tools"] = [{"type": "function", **one["function"]} for one in tools]
        if choice != AUTO:
            more["tool_choice"] = {"type": "function", "name": choice.name} if choice.name else choice.mode
        items = [item for message in messages for item in self._items(message)]
        return {"model": MODEL, "input": items, **more}

    def _items(self, message: Message) -> list[Wire]:
        if message["role"] == "tool":
            result = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            return [result]
        if message["role"] != "assistant":
            return [{"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]}]
        items: list[Wire] = []
        if message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
        if message.get("content") is not None:
            content = [{"type": "output_text", "text": str(message["content"])}]
            items.append({"type": "message", "role": "assistant", "id": "msg_1", "content": content})
        for one in message.get("tool_calls", ()):
            function = one["function"]
            arguments = _text(function["arguments"])
            items.append(
                {"type": "function_call", "call_id": one["id"], "name": function["name"], "arguments": arguments}
            )
        return items

    def read(self, body: Wire) -> Said:
        assert body["object"] == "response"
        said = Said(body["id"], body["model"])
        for item in body["output"]:
            assert item["status"] in ("completed", body["status"])
            if item["type"] == "reasoning":
                said.reasoning += "".join(one["text"] for one in item["content"])
            elif item["type"] == "message":
                assert all(one["type"] == "output_text" for one in item["content"])
                said.text += "".join(one["text"] for one in item["content"])
            else:
                assert item["type"] == "function_call"
                said.calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
        said.finish = "tool_calls" if said.calls else "stop"
        if body["status"] == "incomplete":
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            said.finish = "length"
        usage = body["usage"]
        said.prompt, said.sampled = usage["input_tokens"], usage["output_tokens"]
        said.stored = usage["input_tokens_details"]["cached_tokens"]
        assert usage["total_tokens"] == said.prompt + said.sampled
        said.versions = body["policy_version"]
        return said

    def read_stream(self, stream: str) -> Said:
        found = list(events(stream))
        assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
        assert all(name == data["type"] for name, data in found)
        assert [name for name, _ in found[:2]] == ["response.created", "response.in_progress"]
        last_name, last = found[-1]
        assert last_name == f"response.{last['response']['status']}"
        assert {data["response"]["id"] for _, data in found if "response" in data} == {last["response"]["id"]}
        items: list[Wire] = []
        for index, group in groupby((data for _, data in found if "output_index" in data), lambda d: d["output_index"]):
            assert index == len(items)
            items.append(self._item(list(group)))
        assert items == last["response"]["output"]
        return self.read(last["response"])

    def _item(self, told: list[Wire]) -> Wire:
        """An item from its events, put together from its deltas and compared with what its end says."""
        assert told[0]["type"] == "response.output_item.added"
        assert told[-1]["type"] == "response.output_item.done"
        item: Wire = told[-1]["item"]
        assert {one.get("item_id", item["id"]) for one in told} == {item["id"]}
        text = "".join(one["delta"] for one in told if one["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert (text, told[0]["item"]["arguments"]) == (item["arguments"], "")
        else:
            assert text == "".join(one["text"] for one in item["content"])
            assert told[0]["item"]["content"] == []
        return item

    def error(self, body: Wire) -> str:
        return Chat().error(body)


class Messages(AtOnePath):
    path = "/v1/messages"
    has_stop = True

    def __init__(self) -> None:
        self.headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}

    def body(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        choice: ToolChoice = AUTO,
    ) -> Wire:
        more: Wire = {"stop_sequences": list(stop)} if stop else {}
        if messages[0]["role"] == "system":
            more["system"] = [{"type": "text", "text": messages[0]["content"]}]
            messages = messages[1:]
        if tools:
            more["tools"] = [_tool_of_anthropic(one) for one in tools]
        if choice.name:
            more["tool_choice"] = {"type": "tool", "name": choice.name}
        elif choice != AUTO:
            more["tool_choice"] = {"type": "any" if choice.mode == "required" else choice.mode}
        sent: list[Wire] = []
        for one in messages:
            role, content = self._content(one)
            # Not behind a text: a client that leaves out an empty answer would make one message of two.
            if sent and sent[-1]["role"] == role == "user" and sent[-1]["content"][-1]["type"] == "tool_result":
                sent[-1]["content"] += content
            else:
                sent.append({"role": role, "content": content})
        return {"model": MODEL, "max_tokens": max_tokens or 1000, "messages": sent, **more}

    def _content(self, message: Message) -> tuple[str, list[Wire]]:
        if message["role"] == "tool":
            result = [{"type": "text", "text": message["content"]}]
            return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": result}]
        blocks: list[Wire] = []
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content") is not None:
            blocks.append({"type": "text", "text": message["content"]})
        for one in message.get("tool_calls", ()):
            function = one["function"]
            use = {"type": "tool_use", "id": one["id"], "name": function["name"], "input": function["arguments"]}
            blocks.append(use)
        return message["role"], blocks

    def read(self, body: Wire) -> Said:
        assert (body["type"], body["role"]) == ("message", "assistant")
        said = Said(body["id"], body["model"])
        for block in body["content"]:
            if block["type"] == "thinking":
                said.reasoning += block["thinking"]
            elif block["type"] == "text":
                said.text += block["text"]
            else:
                assert block["type"] == "tool_use"
                said.calls.append((block["id"], block["name"], block["input"]))
        self._end(said, body, body["usage"])
        said.versions = body["policy_version"]
        return said

    def _end(self, said: Said, end: Wire, usage: Wire) -> None:
        reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        said.finish = reasons[end["stop_reason"]]
        assert (end["stop_reason"] == "stop_sequence") == (end["stop_sequence"] is not None)
        said.stop_text = end["stop_sequence"] or ""
        said.stored, said.sampled = usage["cache_read_input_tokens"], usage["output_tokens"]
        said.prompt = usage["input_tokens"] + said.stored + usage["cache_creation_input_tokens"]

    def read_stream(self, stream: str) -> Said:
        found = [(name, data) for name, data in events(stream) if name != "ping"]
        assert all(name == data["type"] for name, data in found)
        assert found[0][0] == "message_start"
        message: Wire = found[0][1]["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        assert [name for name, _ in found[-2:]] == ["message_delta", "message_stop"]
        blocks: list[Wire] = []
        for index, group in groupby((data for _, data in found if "index" in data), lambda data: data["index"]):
            assert index == len(blocks)
            blocks.append(self._block(list(group)))
        end = found[-2][1]
        more = {"content": blocks, "usage": end["usage"], "policy_version": end["policy_version"]}
        return self.read({**message, **end["delta"], **more})

    def _block(self, told: list[Wire]) -> Wire:
        assert told[0]["type"] == "content_block_start"
        assert told[-1]["type"] == "content_block_stop"
        deltas = [one["delta"] for one in told[1:-1]]
        block: Wire = {**told[0]["content_block"]}
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads("".join(one["partial_json"] for one in deltas))
        else:
            field = block["type"]
            assert all(one["type"] == f"{field}_delta" for one in deltas)
            block[field] = "".join(one[field] for one in deltas)
        return block

    def error(self, body: Wire) -> str:
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        return str(body["error"]["message"])


class Gemini:
    """Its calls and results have ids, as its packages send them back."""

    path = "/v1beta/models"
    has_stop = True

    def __init__(self) -> None:
        self.headers = {"x-goog-api-key": KEY}

    def url(self, body: Wire) -> str:
        verb = "streamGenerateContent?alt=sse" if body.get("stream") else "generateContent"
        return f"{self.path}/{body.get('model', MODEL)}:{verb}"

    def with_option(self, body: Wire, name: str, value: Any) -> Wire:
        return {**body, "generationConfig": {**body.get("generationConfig", {}), name: value}}

    def body(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        choice: ToolChoice = AUTO,
    ) -> Wire:
        config: Wire = {"maxOutputTokens": max_tokens} if max_tokens else {}
        config |= {"stopSequences": list(stop)} if stop else {}
        more: Wire = {"generationConfig": config} if config else {}
        if messages and messages[0]["role"] == "system":
            more["systemInstruction"] = {"parts": [{"text": messages[0]["content"]}]}
            messages = messages[1:]
        if tools:
            more["tools"] = [{"functionDeclarations": [_tool_of_gemini(one) for one in tools]}]
        if choice != AUTO:
            calling: Wire = {"mode": {"none": "NONE", "required": "ANY"}[choice.mode]}
            calling |= {"allowedFunctionNames": [choice.name]} if choice.name else {}
            more["toolConfig"] = {"functionCallingConfig": calling}
        names = {one["id"]: one["function"]["name"] for said in messages for one in said.get("tool_calls", ())}
        contents: list[Wire] = []
        for message in messages:
            role, parts = self._parts(message, names)
            is_result = bool(contents) and "functionResponse" in contents[-1]["parts"][-1]
            if is_result and role == "user" and message["role"] == "tool":
                contents[-1]["parts"] += parts
            else:
                contents.append({"role": role, "parts": parts})
        return {"model": MODEL, "contents": contents, **more}

    def _parts(self, message: Message, names: Mapping[str, str | None]) -> tuple[str, list[Wire]]:
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            response = {"output": message["content"]}
            return "user", [{"functionResponse": {"id": call_id, "name": names[call_id], "response": response}}]
        parts: list[Wire] = []
        if message.get("reasoning_content"):
            parts.append({"text": message["reasoning_content"], "thought": True})
        if message.get("content") is not None:
            parts.append({"text": message["content"]})
        for one in message.get("tool_calls", ()):
            function = one["function"]
            made = {"id": one["id"], "name": function["name"], "args": function["arguments"]}
            parts.append({"functionCall": made, "thoughtSignature": "c2ln"})
        return "model" if message["role"] == "assistant" else "user", parts

    def read(self, body: Wire) -> Said:
        said = Said(body["responseId"], body["modelVersion"])
        (candidate,) = body["candidates"]
        assert (candidate["index"], candidate["content"]["role"]) == (0, "model")
        assert candidate["content"]["parts"]
        self._add(said, candidate["content"]["parts"])
        self._end(said, body)
        return said

    def _add(self, said: Said, parts: Sequence[Wire]) -> None:
        for part in parts:
            if "functionCall" in part:
                made = part["functionCall"]
                said.calls.append((made["id"], made["name"], made["args"]))
            elif part.get("thought"):
                said.reasoning += part["text"]
            else:
                said.text += part["text"]

    def _end(self, said: Said, last: Wire) -> None:
        reason = last["candidates"][0]["finishReason"]
        said.finish = {"STOP": "tool_calls" if said.calls else "stop", "MAX_TOKENS": "length"}[reason]
        usage = last["usageMetadata"]
        said.prompt, said.stored = usage["promptTokenCount"], usage["cachedContentTokenCount"]
        said.sampled = usage["candidatesTokenCount"] + usage["thoughtsTokenCount"]
        assert usage["totalTokenCount"] == said.prompt + said.sampled
        said.versions = last["policy_version"]

    def read_stream(self, stream: str) -> Said:
        chunks = [data for name, data in events(stream) if name == ""]
        assert all("\u2028" not in line and "\u2029" not in line for line in stream.split("\n"))
        said = Said(chunks[0]["responseId"], chunks[0]["modelVersion"])
        for chunk in chunks:
            assert (chunk["responseId"], chunk["modelVersion"]) == (said.id, said.model)
            (candidate,) = chunk["candidates"]
            assert candidate["content"]["parts"], "a client drops an answer with a chunk that has none"
            assert ("finishReason" in candidate) == (chunk is chunks[-1])
            self._add(said, candidate["content"]["parts"])
        self._end(said, chunks[-1])
        return said

    def error(self, body: Wire) -> str:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"code", "message", "status"}
        return str(body["error"]["message"])


SPEAKERS: Mapping[str, Speaker] = {
    "chat": Chat(),
    "responses": Responses(),
    "messages": Messages(),
    "gemini": Gemini(),
}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _tool_of_anthropic(tool: ToolSchema) -> Wire:
    function: Wire = {**tool["function"]}
    parameters = function.pop("parameters")
    return {**function, "input_schema": parameters}


def _tool_of_gemini(tool: ToolSchema) -> Wire:
    """In its own way to write a schema, where a tool has a description, and as JSON schema."""
    function: Wire = {**tool["function"]}
    if "description" not in function:
        function["parametersJsonSchema"] = function.pop("parameters")
    elif "parameters" in function:
        function["parameters"] = _in_capitals(function["parameters"])
    return function


def _in_capitals(schema: Wire) -> Wire:
    """Types alone; the schemas of the tests are flat."""
    made = {**schema, "type": schema["type"].upper()}
    inner = {name: {**one, "type": one["type"].upper()} for name, one in schema.get("properties", {}).items()}
    return {**made, "properties": inner}


def _count_openai(said: Said, usage: Wire) -> None:
    said.prompt, said.sampled = usage["prompt_tokens"], usage["completion_tokens"]
    said.stored = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == said.prompt + said.sampled
