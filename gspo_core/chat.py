"""Turns messages into token ids and sampled ids into parsed turns, in the ChatML/Hermes format of the Qwen family.

Rule: sampled ids are never decoded and encoded again. The prompt of the next turn is what was sent, what was sampled,
and a freshly encoded bridge; text is read from ids, never the other way round. Control tokens come from this module
alone: text that spells ``<|im_end|>``, in a tool's result say, is encoded as ordinary characters.
No other chat format is known here, and no model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema

__all__ = [
    "TOOLS_FOOTER",
    "TOOLS_HEADER",
    "CallStatus",
    "HermesCodec",
    "Message",
    "ParsedTurn",
    "Tokenizer",
    "ToolCall",
    "ToolSchema",
    "UnsuitableTokenizer",
    "load_tokenizer",
]

# The wording that Qwen models were trained to read around their tools.
TOOLS_HEADER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_NO_THOUGHT = "<think>\n\n</think>\n\n"


class UnsuitableTokenizer(ValueError):
    """The tokenizer, or what should hold it, cannot be used with this codec."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of plain text: nothing is added, and text never becomes a special token, whatever it spells."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included; damaged UTF-8 becomes U+FFFD."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token that is written exactly so, None if there is none."""
        ...

    @property
    def vocab_size(self) -> int: ...


class HermesCodec:
    """Renders, continues and reads conversations of one model. Stateless, so one serves all episodes."""

    def __init__(self, tokenizer: Tokenizer, *, empty_thought: bool = False) -> None:
        """``empty_thought``: end the generation prompt with an empty think block, as Qwen3 does to switch thinking off;
        leave it out for models without one."""
        self.tokenizer = tokenizer
        self._empty_thought = empty_thought
        self._start, self._end, self._call, self._call_end = (
            _required(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
        )
        self._think, self._think_end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        if empty_thought and (self._think is None or self._think_end is None):
            raise UnsuitableTokenizer("an empty think block is configured, but the tokenizer has no <think> token")
        end_of_text = tokenizer.token_id("<|endoftext|>")
        self.stop_ids: tuple[int, ...] = (self._end,) if end_of_text is None else (self._end, end_of_text)
        """The tokens that end a turn; given to the engine as ids. The sampled one belongs to the turn."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a whole conversation: for the first turn, and for a history that was rewritten."""
        pieces: list[str | int] = []
        if tools:
            system = messages[0] if messages and messages[0]["role"] == "system" else None
            messages = messages[1:] if system else messages
            pieces += [self._start, "system\n", _text(system) + "\n\n" if system else "", _tools_block(tools)]
            pieces += [self._end, "\n"]
        pieces += self._turns(messages)
        return self._encode(pieces + self._generation_prompt() if generation_prompt else pieces)

    def bridge(
        self, prefix_ids: Sequence[int], sampled_ids: Sequence[int], new_messages: Sequence[Message]
    ) -> list[int] | None:
        """The ids that follow ``prefix_ids + sampled_ids``: the turn's end if it was not sampled, ``new_messages``, and
        the generation prompt. None where these cannot continue the conversation; then the caller starts a new branch.
        """
        if any(message["role"] not in ("tool", "user", "system") for message in new_messages):
            return None
        stops = [position for position, token in enumerate(sampled_ids) if token in self.stop_ids]
        if stops and stops[0] != len(sampled_ids) - 1:
            return None  # something was sampled after the end of the turn
        pieces: list[str | int] = []
        if not stops:
            if self._is_thinking(prefix_ids, sampled_ids) and self._think_end is not None:
                pieces.append(self._think_end)
            pieces.append(self._end)
        # The template writes a newline behind the end of a turn, and the engine stops before it.
        return self._encode([*pieces, "\n", *self._turns(new_messages), *self._generation_prompt()])

    def parse(self, sampled_ids: Sequence[int], tool_names: Collection[str] | None = None) -> ParsedTurn:
        """Reads a sampled turn. With ``tool_names``, calls of other tools get the status ``unknown_tool``."""
        ids = list(sampled_ids)
        stop = next((position for position, token in enumerate(ids) if token in self.stop_ids), None)
        complete = stop is not None
        ids = ids[:stop]
        thought, begin, is_open = self._split_thought(ids)
        first_call = next((p for p in range(begin, len(ids)) if ids[p] == self._call), len(ids))
        text = "" if is_open else self.tokenizer.decode(ids[begin:first_call]).strip()
        calls = () if is_open else tuple(self._calls(ids, first_call, tool_names))
        return ParsedTurn(text, calls, complete and not is_open, self.tokenizer.decode(thought).strip())

    def _turns(self, messages: Sequence[Message]) -> Iterator[str | int]:
        for position, message in enumerate(messages):
            role = message["role"]
            if role == "tool":  # neighbouring results share one user turn
                if position == 0 or messages[position - 1]["role"] != "tool":
                    yield from (self._start, "user")
                yield f"\n<tool_response>\n{_text(message)}\n</tool_response>"
                if position + 1 < len(messages) and messages[position + 1]["role"] == "tool":
                    continue
            else:
                yield from (self._start, f"{role}\n{_text(message)}")
                if role == "assistant":
                    yield _written_calls(message)
            yield from (self._end, "\n")

    def _generation_prompt(self) -> list[str | int]:
        return [self._start, "assistant\n" + (_NO_THOUGHT if self._empty_thought else "")]

    def _encode(self, pieces: Iterable[str | int]) -> list[int]:
        """Text between two control tokens is encoded in one piece, as a template's whole text would be."""
        ids: list[int] = []
        text = ""
        for piece in [*pieces, None]:
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                ids += self.tokenizer.encode(text)
                text = ""
            if piece is not None:
                ids.append(piece)
        return ids

    def _is_thinking(self, prefix_ids: Sequence[int], sampled_ids: Sequence[int]) -> bool:
        for token in (*reversed(sampled_ids), *reversed(prefix_ids)):
            if token in (self._think_end, self._call, self._start):
                return False
            if token == self._think:
                return True
        return False

    def _split_thought(self, ids: Sequence[int]) -> tuple[Sequence[int], int, bool]:
        """The reasoning, where the rest begins, and whether the reasoning was left open."""
        begin = ids.index(self._think) + 1 if self._think is not None and self._think in ids else 0
        if self._think_end is not None and self._think_end in ids[begin:]:
            end = ids.index(self._think_end, begin)
            return ids[begin:end], end + 1, False
        if not begin:
            return [], 0, False
        if self._call in ids[begin:]:  # a call closes the reasoning
            end = ids.index(self._call, begin)
            return ids[begin:end], end, False
        return ids[begin:], len(ids), True

    def _calls(self, ids: Sequence[int], position: int, tool_names: Collection[str] | None) -> Iterator[ToolCall]:
        while position < len(ids):
            if ids[position] != self._call:
                position += 1
                continue
            close = next((p for p in range(position + 1, len(ids)) if ids[p] == self._call_end), None)
            end = len(ids) if close is None else close + 1
            raw = self.tokenizer.decode(ids[position + 1 : close])
            if close is None:
                yield ToolCall(None, {}, CallStatus.UNCLOSED_BLOCK, raw, position, end)
            else:
                name, arguments, status = _read_call(raw)
                if status is CallStatus.OK and tool_names is not None and name not in tool_names:
                    status = CallStatus.UNKNOWN_TOOL
                yield ToolCall(name, arguments, status, raw, position, end)
            position = end


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model directory (``tokenizer.json``)."""
    return _FileTokenizer(Path(model_dir) / "tokenizer.json")


class _FileTokenizer:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise UnsuitableTokenizer(f"{path} does not exist; a model directory holds its tokenizer in this file")
        self._backend = Backend.from_file(str(path))
        self._backend.encode_special_tokens = True  # text never becomes a special token
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        # A policy can write half a surrogate pair as JSON escape; it has no bytes.
        sound = text.encode("utf-8", "replace").decode("utf-8")
        return list(self._backend.encode(sound, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found


def _required(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise UnsuitableTokenizer(f"the tokenizer has no token {token}, which the ChatML/Hermes format is made of")
    return found


def _tools_block(tools: Sequence[ToolSchema]) -> str:
    return TOOLS_HEADER + "".join(f"\n{_to_json(tool)}" for tool in tools) + TOOLS_FOOTER


def _written_calls(message: Message) -> str:
    """The calls of an assistant message of the history, as the model would have written them."""
    text = ""
    for call in message.get("tool_calls") or ():
        function: Mapping[str, Any] = call.get("function", call)
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else _to_json(arguments)
        separator = "\n" if text or _text(message) else ""
        text += f'{separator}<tool_call>\n{{"name": "{function["name"]}", "arguments": {written}}}\n</tool_call>'
    return text


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(f"this codec renders text only, but a {message['role']} message has other content parts")


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_call(raw: str) -> tuple[str | None, Any, CallStatus]:
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None, {}, CallStatus.INVALID_JSON
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None, {}, CallStatus.MISSING_NAME
    return name, value.get("arguments", {}), CallStatus.OK


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
