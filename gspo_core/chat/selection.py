"""Selects a model's codec: the hand-written one if it agrees with the model's own template, else that template.

Rule: it tests agreement: probe conversations rendered both ways must give the same ids. If it cannot decide, it raises
an error that names the key to set and never guesses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from gspo_core.chat.hermes import HermesCodec
from gspo_core.chat.template import TemplateCodec, TemplateRefused
from gspo_core.chat.tokenizer import Tokenizer, UnsuitableTokenizer, load_tokenizer
from gspo_core.chat.turns import (
    CallReader,
    LlamaCalls,
    NoCalls,
    TaggedCalls,
    open_glm_xml,
    open_hermes,
    open_qwen_xml,
    read_glm_xml,
    read_hermes,
    read_qwen_xml,
)
from gspo_core.json_value import JSON
from gspo_core.messages import ForkReason, Message, MessageCall, ParsedTurn, ToolSchema
from gspo_core.model_files import calls_of, chat_problem, chat_template_of

Format: TypeAlias = Literal["auto", "hermes", "template"]
Calls: TypeAlias = Literal["auto", "hermes", "qwen_xml", "glm_xml", "llama_json", "none"]
Thinking: TypeAlias = Literal["keep", "template"]

_CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


class UnsuitableChat(ValueError):
    """No chat codec fits the model under the job's settings. The text says what to change."""


class ChatCodec(Protocol):
    """Converts between messages and ids for one model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = True,
        own: Mapping[int, int] | None = None,
    ) -> list[int]:
        """``own``: the messages, by their place, whose text the policy wrote, each with the number of its characters
        that are the policy's: there, tags of calls and thoughts are control tokens. None: all of the assistant's."""
        ...

    def bridge(
        self,
        prefix_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
    ) -> list[int] | ForkReason: ...

    def call_opening(self, name: str = "") -> list[int]: ...

    def parse(self, sampled_ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> ParsedTurn: ...

    def message(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        turn: ParsedTurn | None = None,
    ) -> Message: ...


def load_codec(
    model_dir: Path,
    *,
    format: Format = "auto",
    calls: Calls = "auto",
    thinking: Thinking = "keep",
    variables: Mapping[str, JSON] | None = None,
) -> ChatCodec:
    """The codec of a model directory. Raises ``UnsuitableChat`` or ``UnsuitableTokenizer``."""
    model_dir = Path(model_dir)
    tokenizer = load_tokenizer(model_dir)
    try:
        template, problem = chat_template_of(model_dir), chat_problem(model_dir, calls)
    except ValueError as error:
        raise UnsuitableChat(str(error)) from error
    if problem is not None:
        raise UnsuitableChat(problem)
    given = _special_tokens(model_dir) | dict(variables or {})
    if template is None:
        if format == "template":
            raise UnsuitableChat(f"chat.format is template, but {model_dir} has no chat template")
        return _without_template(tokenizer, model_dir, thinking, given)
    ends = _model_ends(model_dir)
    try:
        controls = _control(tokenizer, ends)
        native = None if format == "template" else _native(tokenizer, template, given, thinking, controls)
        if native is not None:
            return native
        if format == "hermes":
            raise UnsuitableChat(
                "chat.format is hermes, but the model's own template writes conversations in another way; "
                "leave the key out to follow the template"
            )
        reader = _call_reader(tokenizer, template, calls)
        return TemplateCodec(tokenizer, template, reader, thinking=thinking, variables=given, stop_ids=ends)
    except TemplateRefused as error:
        raise UnsuitableChat(f"the chat template of {model_dir} cannot be used: {error}") from error


def _without_template(
    tokenizer: Tokenizer, model_dir: Path, thinking: Thinking, variables: Mapping[str, JSON]
) -> ChatCodec:
    missing = [token for token in _CHATML if tokenizer.token_id(token) is None]
    if missing:
        raise UnsuitableChat(
            f"{model_dir} has no chat template, and its tokenizer lacks {', '.join(missing)} of the ChatML/Hermes "
            "format: put the model's template there as chat_template.jinja"
        )
    empty_thought, ends = variables.get("enable_thinking") is False, _control(tokenizer, _model_ends(model_dir))
    return HermesCodec(tokenizer, thinking=thinking, empty_thought=empty_thought, stop_ids=ends)


def _native(
    tokenizer: Tokenizer, template: str, variables: Mapping[str, JSON], thinking: Thinking, ends: Sequence[int]
) -> HermesCodec | None:
    """The hand-written codec in the variant that matches the template, if any."""
    if any(tokenizer.token_id(token) is None for token in _CHATML):
        return None
    theirs = TemplateCodec(tokenizer, template, NoCalls(), variables=variables)
    default_system = _default_system(theirs)
    for reasons, empty_thought in product((False, True), repeat=2):
        try:
            ours = HermesCodec(
                tokenizer,
                default_system=default_system,
                reasons=reasons,
                empty_thought=empty_thought,
                thinking=thinking,
                stop_ids=ends,
            )
        except UnsuitableTokenizer:  # no think tokens
            continue
        if _agree(ours, theirs):
            return ours
    return None


def _agree(ours: HermesCodec, theirs: TemplateCodec) -> bool:
    try:
        return all(
            ours.render(messages, tools, generation_prompt=prompt)
            == theirs.render(messages, tools, generation_prompt=prompt)
            for messages, tools in _probes()
            for prompt in (True, False)
        )
    except TemplateRefused:
        return False


def _default_system(codec: TemplateCodec) -> str | None:
    text = codec.tokenizer.decode(codec.render([{"role": "user", "content": "x"}]))
    begin, end = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"
    return text[len(begin) : text.index(end)] if text.startswith(begin) and end in text else None


def _probes() -> Iterator[tuple[list[Message], list[ToolSchema]]]:
    tool: ToolSchema = {
        "type": "function",
        "function": {"name": "add", "description": "Ä <b>", "parameters": {"type": "object", "properties": {}}},
    }
    call: MessageCall = {"type": "function", "function": {"name": "add", "arguments": {"x": [1, "ü"], "y": None}}}
    system: Message = {"role": "system", "content": "Be brief."}
    user: Message = {"role": "user", "content": " What? "}
    answer: Message = {"role": "assistant", "content": "That."}
    acting: Message = {"role": "assistant", "content": "I add.", "tool_calls": [call, call]}
    silent: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "content": "2"}
    for tools in ([], [tool]):
        for begin in ([user], [system, user]):
            yield begin, tools
            yield [*begin, answer], tools
            yield [*begin, answer, user], tools
            yield [*begin, acting, result, result, silent, result], tools
            for turn in (answer, acting):
                thoughtful: Message = {**turn, "reasoning_content": "Hm."}
                yield [*begin, thoughtful, result if turn is acting else user], tools
                yield [*begin, thoughtful, user, turn], tools


def _call_reader(tokenizer: Tokenizer, template: str, calls: Calls) -> CallReader:
    chosen = calls_of(template) if calls == "auto" else calls
    if chosen == "none":
        return NoCalls()
    if chosen == "llama_json":
        return LlamaCalls(tokenizer)
    if chosen == "glm_xml":
        return TaggedCalls(tokenizer, read_glm_xml, open_glm_xml)
    if chosen == "qwen_xml":
        return TaggedCalls(tokenizer, read_qwen_xml, open_qwen_xml)
    return TaggedCalls(tokenizer, read_hermes, open_hermes)


def _special_tokens(model_dir: Path) -> dict[str, JSON]:
    """``bos_token`` and other special tokens that templates use."""
    config = _read_json(model_dir / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _model_ends(model_dir: Path) -> list[int]:
    """The tokens at which engines stop by default."""
    ends: list[int] = []
    for name in ("config.json", "generation_config.json"):
        given = _read_json(model_dir / name).get("eos_token_id")
        ends += [token for token in (given if isinstance(given, list) else [given]) if isinstance(token, int)]
    return ends


def _control(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Those that no text is encoded as. Where a model ends at another one, its job is refused (``_check_ends``)."""
    known = {tokenizer.token_id(token) for token in tokenizer.control_tokens}
    return [token for token in ids if token in known]


def _read_json(path: Path) -> dict[str, JSON]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsuitableChat(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
