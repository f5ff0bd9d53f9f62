"""A chat codec over a model's own template that continues a conversation only where this is provably correct.

Rule: a bridge comes from the template's rendering of the whole conversation, and only if everything before the sampled
turn is unchanged and the turn itself matches the sample; otherwise the caller gets the reason and starts a new branch.
Sampled ids are kept either way.
Text that spells a control token stays text: it is defused before the template sees it. Only an assistant's own turn
keeps its call and thought tags, because its text stands for sampled ids; what others have put into the assistant's
mouth is text. A template is untrusted code: it runs in a sandbox, with the helpers that model publishers expect, and
sees only its inputs. It has no clock, so prompts do not depend on the date. Compiling one imports `jinja2`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from gspo_core.chat.text import strict_json, text_of
from gspo_core.chat.tokenizer import Tokenizer, UnsuitableTokenizer
from gspo_core.chat.turns import CallReader, NoCalls, TurnReader, can_be_written
from gspo_core.json_value import JSON
from gspo_core.messages import (
    CalledFunction,
    CallStatus,
    ForkReason,
    Message,
    MessageCall,
    ParsedTurn,
    ToolCall,
    ToolSchema,
)

if TYPE_CHECKING:
    import jinja2
    from jinja2.nodes import Node
    from jinja2.parser import Parser

T = TypeVar("T")

_PROBE = "gspo probe"
_PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "probe", "description": _PROBE, "parameters": {"type": "object", "properties": {}}},
}
_THOUGHT = re.compile(r"<think>.*?</think>\s*|<think>\s*$", re.DOTALL)
# Whose messages can follow a turn.
_FOLLOWERS: tuple[Literal["user", "tool", "system"], ...] = ("user", "tool", "system")
_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF
# Tags that an assistant writes itself and templates look for in its text.
_OWN_TAGS = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})


class TemplateRefused(ValueError):
    """A chat template is unusable or rejects a conversation."""


class Template:
    def __init__(self, compiled: jinja2.Template) -> None:
        self._compiled = compiled

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        variables: Mapping[str, JSON],
        generation_prompt: bool,
    ) -> str:
        """Raises ``TemplateRefused``."""
        try:
            return str(
                self._compiled.render(
                    **{"messages": messages, "tools": tools or None, "add_generation_prompt": generation_prompt},
                    **variables,
                )
            )
        except TemplateRefused:
            raise
        except Exception as error:  # untrusted code
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}: {error}") from error


def compile_template(source: str) -> Template:
    """Raises ``TemplateRefused``."""
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise TemplateRefused("chat templates need the package jinja2: pip install 'jinja2>=3.1'") from None

    class GenerationTag(Extension):
        """``{% generation %}`` marks assistant text for other programs; ignored here."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return Template(environment.from_string(source))
    except TemplateSyntaxError as error:
        raise TemplateRefused(f"the chat template cannot be read (line {error.lineno}): {error.message}") from error


def _to_json(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(f"the chat template says: {message}")


class TemplateCodec:
    """Renders, continues and reads conversations of one model. Stateless, so one instance serves all episodes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        calls: CallReader,
        *,
        thinking: Literal["keep", "template"] = "keep",
        variables: Mapping[str, JSON] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """``variables`` are passed to the template; ``stop_ids`` end a turn in addition to the template's own end
        token. ``thinking: template`` follows a template that removes earlier reasoning, at the price of new branches;
        ``keep`` continues after the sampled ids."""
        self.tokenizer = tokenizer
        self._template = compile_template(template)
        self._variables = dict(variables or {})
        self._keeps_thinking = thinking == "keep"
        self._controls = _one_of(tokenizer.control_tokens)
        self._ends = self._find_ends()
        end_ids = [token for end in self._ends.tokens if (token := tokenizer.token_id(end)) is not None]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*end_ids, *stop_ids)))
        """Ids of the tokens that end a turn, for the engine. The sampled one belongs to the turn."""
        prompt = self._template.render([{"role": "user", "content": _PROBE}], (), self._variables, True)
        self._turn_reader = TurnReader(
            tokenizer, self.stop_ids, calls, opens_thought=prompt.rstrip().endswith("<think>")
        )
        self._takes_several_calls = self._accepts(2)
        self._takes_tools = not isinstance(calls, NoCalls) or self._shows_tools(prompt)
        self._check_encoding(prompt)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = True,
        own: Mapping[int, int] | None = None,
    ) -> list[int]:
        """The ids of a whole conversation. ``own``: as ``ChatCodec`` has it. Raises ``TemplateRefused``."""
        if tools and not self._takes_tools:
            raise TemplateRefused(
                "the chat template shows the model no tools, and there are some: use a model that was trained with "
                "tools, or an environment without any"
            )
        defused = _Defused(self._controls, messages, tools)
        return self._encode(self._text(defused, messages, tools, generation_prompt, own), defused)

    def bridge(
        self,
        prefix_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | ForkReason:
        """The ids that follow ``prefix_ids + sampled_ids``, or the reason for a fork. ``history`` holds the
        messages behind ``prefix_ids``, which the turn answered."""
        if any(message["role"] == "assistant" for message in new_messages):
            return ForkReason.ASSISTANT_MESSAGE
        stops = [position for position, token in enumerate(sampled_ids) if token in self.stop_ids]
        if stops and stops[0] != len(sampled_ids) - 1:
            return ForkReason.SAMPLED_AFTER_END
        turn = self.message(sampled_ids, tools)
        defused = _Defused(self._controls, history, [turn], new_messages, tools)
        try:
            before = self._text(defused, history, tools, True)
            after = self._text(defused, [*history, turn, *new_messages], tools, True)
        except TemplateRefused:
            return ForkReason.TEMPLATE_REFUSED
        # Contents are defused, so these tokens are all structural: the turn ends at the next one after its prompt.
        ends = [end.start() for end in self._ends.pattern.finditer(after)]
        num_before = len(self._ends.pattern.findall(before))
        if len(ends) <= num_before:
            return ForkReason.HISTORY_REWRITTEN
        head, following = after[: ends[num_before]], after[ends[num_before] :]
        if not self._plain(head).startswith(self._plain(before)):
            return ForkReason.HISTORY_REWRITTEN
        written = self._plain(head)[len(self._plain(before)) :]
        if not self._says_the_same(self._encode(written, defused), sampled_ids, tools):
            return ForkReason.TURN_REWRITTEN
        ids = self._encode(following, defused)
        if not stops:
            return [*self._turn_reader.end_of_open_thought(sampled_ids), *ids]
        # A turn that was ended needs no second end; what opens the next message is one only where it is that message's.
        is_there = self._ends.are_closing or sampled_ids[-1] == ids[0]
        return ids[1:] if is_there else ids

    def call_opening(self, name: str = "") -> list[int]:
        """The ids that begin a turn which is a call, of the tool ``name`` or of any. They belong to the turn, though
        the policy does not sample them. Empty where calls have no beginning of their own."""
        ids: list[int] = []
        for piece in self._turn_reader.opening(name):
            ids += self._encode_plain(piece) if isinstance(piece, str) else [piece]
        return ids

    def parse(self, sampled_ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> ParsedTurn:
        """Read a sampled turn. With ``tools``, calls to other tools get the status ``unknown_tool``."""
        return self._turn_reader.read(sampled_ids, tools)

    def message(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        turn: ParsedTurn | None = None,
    ) -> Message:
        """A sampled turn as a history message that the template accepts; ``turn`` is its result from ``parse``, if
        known."""
        turn = turn or self.parse(sampled_ids, tools)
        as_calls = can_be_written(turn) and (len(turn.calls) < 2 or self._takes_several_calls)
        return self._turn_reader.message(sampled_ids, turn, as_text=not as_calls)

    def _says_the_same(
        self, written_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[ToolSchema]
    ) -> bool:
        """Whether the template's version of the turn parses like the sampled one."""
        opens_thought = self._turn_reader.opens_thought and not self._keeps_thinking
        written = self._turn_reader.read([*written_ids, self.stop_ids[0]], tools, opens_thought=opens_thought)
        sampled = self._turn_reader.read(sampled_ids, tools)
        if not self._keeps_thinking and written.reasoning != sampled.reasoning:
            return False
        return written.text == sampled.text and [_meaning(call) for call in written.calls] == [
            _meaning(call) for call in sampled.calls
        ]

    def _plain(self, text: str) -> str:
        """Text for comparing histories: without think blocks if the job keeps them as sampled."""
        if not self._keeps_thinking:
            return text
        # Turn by turn: a block that was never closed must not reach into the next one.
        return "".join(_THOUGHT.sub("", piece) for piece in self._ends.pieces(text))

    def _text(
        self,
        defused: _Defused,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        generation_prompt: bool,
        own: Mapping[int, int] | None = None,
    ) -> str:
        normal = defused.messages([_normal(message) for message in messages], own)
        return self._template.render(normal, defused(tools), self._variables, generation_prompt)

    def _encode(self, text: str, defused: _Defused) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._controls.finditer(text):
            ids += self._encode_plain(defused.restore(text[position : match.start()]))
            token_id = self.tokenizer.token_id(match[0])
            assert token_id is not None
            ids.append(token_id)
            position = match.end()
        return ids + self._encode_plain(defused.restore(text[position:]))

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if text else []

    def _find_ends(self) -> _Ends:
        turn: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        text = self._template.render(turn, (), self._variables, False)
        found = self._controls.search(text, text.find(_PROBE) + len(_PROBE))
        if found is not None and _PROBE in text:
            return _Ends((found[0],), are_closing=True)
        opening = dict.fromkeys(self._opening([*turn, {"role": role, "content": "x"}]) for role in _FOLLOWERS)
        opening.pop("", None)
        if not opening or None in opening:
            raise UnsuitableTokenizer(
                "the chat template writes no control token behind the assistant's words, so nothing would end a turn"
            )
        return _Ends(tuple(end for end in opening if end), are_closing=False)

    def _opening(self, conversation: Sequence[Message]) -> str | None:
        """The control token right behind the turn; None if there is none, empty if the template refuses that."""
        try:
            text = self._template.render(conversation, (), self._variables, False)
        except TemplateRefused:
            return ""
        _, probe, behind = text.partition(_PROBE)
        found = self._controls.match(behind.lstrip()) if probe else None
        return None if found is None else found[0]

    def _shows_tools(self, prompt: str) -> bool:
        question: list[Message] = [{"role": "user", "content": _PROBE}]
        return prompt != self._template.render(question, (_PROBE_TOOL,), self._variables, True)

    def _accepts(self, num_calls: int) -> bool:
        call = _normal_call({"function": {"name": "f", "arguments": {"x": 1}}})
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}
        answer: Message = {"role": "tool", "content": "1", "name": "f", "tool_call_id": call["id"]}
        conversation: list[Message] = [{"role": "user", "content": "x"}, turn, *[answer] * num_calls]
        try:
            self._template.render(conversation, (), self._variables, True)
        except TemplateRefused:
            return False
        return True

    def _check_encoding(self, prompt: str) -> None:
        """Check that encoding the pieces between control tokens one by one gives the ids of the whole text."""
        if self._encode(prompt, _Defused(self._controls)) != self.tokenizer.encode_whole(prompt):
            raise UnsuitableTokenizer(
                "this tokenizer encodes text behind a control token in another way than text alone, which the codec "
                "for chat templates does not know"
            )


class _Ends:
    """The tokens that end a turn: one that closes it, or, where a format has none (GLM), those that open what comes
    next, which the policy samples all the same."""

    def __init__(self, tokens: tuple[str, ...], *, are_closing: bool) -> None:
        self.tokens = tokens
        self.are_closing = are_closing
        self.pattern = _one_of(tokens)

    def pieces(self, text: str) -> Iterator[str]:
        """The text, cut behind each end."""
        begin = 0
        for end in self.pattern.finditer(text):
            yield text[begin : end.end()]
            begin = end.end()
        yield text[begin:]


def _one_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """A pattern that matches the longest token, as tokenizers do."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


class _Defused:
    """Inserts a marker into text that spells a control token and removes it after rendering."""

    def __init__(self, controls: re.Pattern[str], *values: Sequence[Message] | Sequence[ToolSchema]) -> None:
        self._controls = controls
        seen = repr(values)
        # Pick a private-use character absent from the text; ``repr`` shows them escaped.
        codes = range(_FIRST_PRIVATE, _LAST_PRIVATE)
        self._mark = next(chr(code) for code in codes if f"\\u{code:04x}" not in seen)

    def messages(self, messages: Sequence[Message], own: Mapping[int, int] | None = None) -> list[Message]:
        """Defuse messages; an assistant's own text keeps the tags that an assistant writes itself."""
        defused: list[Message] = []
        for place, message in enumerate(messages):
            safe = self(message)
            if message["role"] == "assistant":
                text = text_of(message)
                num_own = len(text) if own is None else own.get(place, 0)
                safe["content"] = self._controls.sub(partial(self._unless_own, num_own), text)
            defused.append(safe)
        return defused

    def __call__(self, value: T) -> T:
        return cast(T, self._safe(value))

    def _safe(self, value: object) -> object:
        """A defused copy of the same shape."""
        if isinstance(value, str):
            return self._controls.sub(self._marked, value)
        if isinstance(value, Mapping):
            return {self._safe(key): self._safe(item) for key, item in value.items()}
        if isinstance(value, Iterable):
            return [self._safe(item) for item in value]
        return value

    def _marked(self, match: re.Match[str]) -> str:
        return match[0][0] + self._mark + match[0][1:]

    def _unless_own(self, num_own: int, match: re.Match[str]) -> str:
        return match[0] if match[0] in _OWN_TAGS and match.end() <= num_own else self._marked(match)

    def restore(self, text: str) -> str:
        return text.replace(self._mark, "")


def _normal(message: Message) -> Message:
    """The message as templates expect it: text as a string, call arguments as objects."""
    normal: Message = {**message, "content": text_of(message)}
    if message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in message["tool_calls"]]
    else:
        normal.pop("tool_calls", None)
    return normal


def _normal_call(call: MessageCall) -> MessageCall:
    function = cast(CalledFunction, {**(call.get("function") or call)})
    if isinstance(function["arguments"], str):
        function["arguments"] = strict_json(function["arguments"])
    return {"id": "call00000", "type": "function", **call, "function": function}


def _meaning(call: ToolCall) -> tuple[CallStatus, str | None, JSON]:
    readable = call.name is not None
    return (call.status, call.name, call.arguments) if readable else (call.status, None, call.raw.strip())
