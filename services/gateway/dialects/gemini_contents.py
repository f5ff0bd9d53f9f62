"""The conversation of a Gemini request, read into messages.

Rule: neighbouring contents of the model are one message, since clients keep an answer as the chunks that it came in.
A result belongs to the call of its id, and else to the first call of its name that has no result yet, of the model's
last message; a call without an id is named by its place in the conversation, so equal conversations are equal asks.
A result that is there again, word for word and with its id, is left out and named: the Gemini CLI sends each twice
where it goes on with an earlier session.
"""

from __future__ import annotations

import msgspec

from gspo_core.json_value import JSON
from gspo_core.messages import Message, MessageCall
from services.gateway.dialects import asks
from services.gateway.dialects.sent import FieldValue, Reader, ReadFields

# Keys of a result that hold it whole; one named otherwise, like ``error``, is shown with its name.
_WHOLE_RESULTS = frozenset({"output", "result"})


def read_instructions(reader: Reader, sent: FieldValue) -> list[Message]:
    taken = reader.take(sent)
    texts = [_text_of(reader, part, "the instructions") for part in taken.need("parts").items()]
    text = asks.stable(reader, texts)
    return [{"role": "system", "content": text}] if text else []


def read_contents(reader: Reader, contents: FieldValue) -> list[Message]:
    conversation = _Conversation(reader)
    for one in contents.items():
        conversation.add(one)
    return asks.not_empty(conversation.messages, contents)


class _Conversation:
    def __init__(self, reader: Reader) -> None:
        self.messages: list[Message] = []
        self._reader = reader
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []
        """Id and name of the last calls that have no result yet."""
        self._closed: dict[str, str] = {}
        """The result of each of the last calls, by its id."""

    def add(self, content: FieldValue) -> None:
        taken = self._reader.take(content)
        role, parts = taken.get("role"), taken.need("parts")
        if role is None or role.value in ("user", "function", "tool"):
            self._of_user(parts)
        elif role.value == "model":
            self._of_model(parts)
        else:
            raise role.fault("must be user, model or function")

    def _of_user(self, parts: FieldValue) -> None:
        is_new = True
        for part in parts.items():
            taken = self._reader.take(part)
            if (result := taken.get("functionResponse")) is not None:
                taken.end("the result of a function")
                self._add_result(result)
                is_new = True
                continue
            text = _text(taken, part, "a part of the user")
            before = self.messages[-1] if self.messages and not is_new else None
            if before is None:
                self.messages.append({"role": "user", "content": text})
            else:
                before["content"] = f"{before.get('content')}{text}"
            is_new = False

    def _add_result(self, sent: FieldValue) -> None:
        taken = self._reader.take(sent)
        sent_id, name, response = taken.get("id"), taken.need("name"), taken.get("response")
        text = "" if response is None else _result_text(response.object())
        call_id = "" if sent_id is None else sent_id.text()
        if call_id and self._closed.get(call_id) == text:
            self._reader.ignore(sent.place)
            return
        call_id = self._answered(call_id, name)
        self._closed[call_id] = text
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _answered(self, call_id: str, name: FieldValue) -> str:
        """The id of the call that a result belongs to."""
        found = next((one for one in self._open if one[0] == call_id), None)
        if found is None and call_id not in self._closed:
            found = next((one for one in self._open if one[1] == name.name()), None)
        if found is not None:
            self._open.remove(found)
            return found[0]
        if not call_id:
            raise name.fault("is of no call before it that has no result yet")
        return call_id

    def _of_model(self, parts: FieldValue) -> None:
        texts, thoughts, calls = list[str](), list[str](), list[MessageCall]()
        for part in parts.items():
            taken = self._reader.take(part)
            thought, call = taken.get("thought"), taken.get("functionCall")
            if call is not None:
                taken.end("a call")
                calls.append(self._call(call))
            else:
                is_thought = thought is not None and thought.flag()
                (thoughts if is_thought else texts).append(_text(taken, part, "a part of the model"))
        before = self.messages[-1] if self.messages else None
        if before is None or before["role"] != "assistant":
            before = {"role": "assistant", "content": None}
            self.messages.append(before)
            self._open, self._closed = [], {}
        _extend(before, "".join(texts), "".join(thoughts), calls)
        self._open += [(str(one["id"]), str(one["function"]["name"])) for one in calls]

    def _call(self, sent: FieldValue) -> MessageCall:
        taken = self._reader.take(sent)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call_id, args = taken.get("id"), taken.get("args")
        named = FieldValue(f"call_{number}") if call_id is None or call_id.value == "" else call_id
        return asks.call(named, taken.need("name"), {} if args is None else args.value)


def _extend(message: Message, text: str, thought: str, calls: list[MessageCall]) -> None:
    message["content"] = f"{message.get('content') or ''}{text}" or None
    if thought:
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    if calls:
        message["tool_calls"] = [*message.get("tool_calls", ()), *calls]


def _text_of(reader: Reader, part: FieldValue, what: str) -> str:
    return _text(reader.take(part), part, what)


def _text(taken: ReadFields, part: FieldValue, what: str) -> str:
    """A part without a text says nothing: some hold a signature alone."""
    text = taken.get("text")
    taken.end(what)
    if text is None and not part.object():
        raise part.fault("holds nothing")
    return "" if text is None else text.text()


def _result_text(response: dict[str, JSON]) -> str:
    whole = next(iter(response.values())) if len(response) == 1 and response.keys() <= _WHOLE_RESULTS else response
    return whole if isinstance(whole, str) else msgspec.json.encode(whole).decode()
