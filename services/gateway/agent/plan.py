"""Plans how a request becomes a turn: what of it counts, whether it fits, which ids it is answered behind, and why.

Rule: nothing is changed here. What its job says differs from one request to the next is gone before anything is
compared, rendered or recorded, and named in ``TurnRequest.left_out``. Nobody is refused whose request might fit.
Where the stored ids can be gone on from, they are; only what cannot be is rendered anew. A long request is encoded
beside the event loop first, from copies; what its turn goes on from is decided after that, and where it is something
else by then, what was encoded is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from gspo_core.chat import ChatCodec
from gspo_core.chat.text import text_of, to_json
from gspo_core.messages import ForkReason, Message
from services.episodes.fingerprints import of_messages
from services.episodes.matching import Beginnings, History, PrefixMatch, Rewritten, TurnEntry, added
from services.episodes.tree import TokenTree, Turn
from services.gateway.dialects.asks import with_digest
from services.gateway.dialects.turns import Refusal, RefusalKind, ToolChoice, TurnRequest

T = TypeVar("T")

# How many places of a pattern's first words are looked at in one request. Each costs a microsecond; what stands behind
# them stays.
MOST_PLACES = 1000
# Encoding more takes milliseconds for each of many at once, in which nobody else is answered.
LONG_BYTES = 8 << 10
# Text that people write has fewer bytes a token; a request with more for each token that fits is looked at first.
MOST_BYTES_A_TOKEN = 8
_PIECE_CHARS = 64 << 10
# What takes longer has threads of its own: all others would wait for it in theirs.
_HUGE_BYTES = 64 << 10
_FOR_HUGE = ThreadPoolExecutor(2, "huge requests")
_MARGIN = 2
_MOST_TIMES = 16


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """How a turn begins: the ids to read, and where they go."""

    token_ids: Sequence[int]
    """All that is read; the last ``num_begun`` of them begin the answer."""
    after: Turn | None = None
    """It goes on at the end of this turn, or forks from there."""
    num_stored: int = 0
    reason: str = ""
    is_rendered: bool = False
    num_begun: int = 0
    is_extended: bool = False
    """The client has more behind the answer that it goes on from than it was told."""

    @property
    def num_prompt(self) -> int:
        return (0 if self.after is None else self.after.end) + len(self.token_ids)

    @property
    def num_unsealed(self) -> int:
        """Prompt tokens that the turn's first segment holds. A fork reads anew what lies before it."""
        if self.after is None or not self.after.is_tip:
            return self.num_prompt
        return self.after.num_unsealed + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a request that goes on from here comes to."""

    goes_on: tuple[object, ...]
    following: list[int] | ForkReason | None
    """The ids that follow its parent's, where it has one."""
    whole: list[int] | None
    """All ids, where they are needed."""


class TurnPlanner:
    def __init__(self, codec: ChatCodec, tree: TokenTree, history: History) -> None:
        self._codec = codec
        self._tree = tree
        self._history = history
        self._messages: dict[int, tuple[bytes, int, Message]] = {}
        """Messages by turn, with the digest of the tools and the number of tokens that they were read with."""

    def place(self, ask: TurnRequest) -> PrefixMatch:
        """Raises ``Refusal``."""
        if not ask.messages or ask.messages[-1]["role"] == "assistant":
            message = "the last message must not be the assistant's: the policy answers it"
            raise Refusal(RefusalKind.INVALID, message, param="messages")
        try:
            return self._history.place(ask.messages, ask.tools, ask.said)
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(error) from error

    def knows(self, request: Beginnings) -> bool:
        """Whether ``place`` finds a turn for it."""
        try:
            return self._history.knows(request)
        except (ValueError, TypeError, KeyError):
            return False

    async def num_beyond(self, ask: TurnRequest, num_most: int) -> int | None:
        """So many tokens at least of a conversation far beyond ``num_most``, before it is encoded as a whole."""
        if not is_long(ask) or not may_be_too_long(ask, num_most):
            return None
        return await beside(ask, num_beyond, ask, self._codec.tokenizer.encode, num_most)

    async def encoded(self, ask: TurnRequest) -> Encoded | None:
        """None for a request that is short, or repeats another. Raises ``Refusal``."""
        if not is_long(ask):
            return None
        place = self.place(ask)
        if place.again is not None:
            return None
        messages, own = self._as_answered(place, ask)
        goes_on = self._goes_on(place, own)
        prefix, said = None, array("i")
        if place.parent is not None:
            after = self._tree.turns[place.parent.number]
            prefix, said = after.prompt, array("i", after.said)  # copies: the loop goes on meanwhile
        return await beside(ask, self._encode, place, messages, own, ask, goes_on, prefix, said)

    def _encode(
        self,
        place: PrefixMatch,
        messages: Sequence[Message],
        own: Mapping[int, int],
        ask: TurnRequest,
        goes_on: tuple[object, ...],
        prefix: Sequence[int] | None,
        said: Sequence[int],
    ) -> Encoded | None:
        """None where it cannot be: whoever does it again is told why."""
        following: list[int] | ForkReason | None = None
        try:
            if prefix is not None:
                history = messages[: place.num_asked]
                following = self._codec.bridge(
                    prefix, said, messages[place.num_old :], history=history, tools=ask.tools
                )
            if isinstance(following, list):
                return Encoded(goes_on, following, None)
            return Encoded(goes_on, following, self._codec.render(messages, ask.tools, own=own))
        except (ValueError, TypeError, KeyError):
            return None

    def _goes_on(self, place: PrefixMatch, own: Mapping[int, int]) -> tuple[object, ...]:
        """Equal where the same request goes on from the same ids, and reads as much of it as the policy's words."""
        if place.parent is None:
            return place.num_old, dict(own)
        return place.num_old, dict(own), place.parent.number, self._tree.turns[place.parent.number].end

    def beginning(self, place: PrefixMatch, ask: TurnRequest, encoded: Encoded | None = None) -> TurnPrompt:
        """``encoded``: of the same request. Raises ``Refusal``."""
        found, begun = self._behind(place, ask, encoded), self._begun(ask.choice)
        return replace(found, token_ids=[*found.token_ids, *begun], num_begun=len(begun)) if begun else found

    def _begun(self, choice: ToolChoice) -> Sequence[int]:
        if choice.mode != "required":
            return ()
        opening = self._codec.call_opening(choice.name)
        if not opening:
            message = (
                "cannot be acted on: calls of this model have no beginning that could be given to it; leave it out"
            )
            raise Refusal(RefusalKind.INVALID, f"tool_choice {message}", param="tool_choice")
        return opening

    def _behind(self, place: PrefixMatch, ask: TurnRequest, encoded: Encoded | None) -> TurnPrompt:
        if place.again is not None:
            prompt = self._tree.turns[place.again.number].prompt
            return TurnPrompt(prompt, num_stored=len(prompt), reason=place.reason)
        messages, own = self._as_answered(place, ask)
        if encoded is not None and encoded.goes_on != self._goes_on(place, own):
            encoded = None
        try:
            reason = place.reason
            if place.parent is not None:
                after = self._tree.turns[place.parent.number]
                more = self._codec.tokenizer.encode(self._added(place.parent, place.words or ""))
                found = encoded.following if encoded is not None else None
                if found is None:
                    found = self._codec.bridge(
                        after.prompt,
                        after.said,
                        messages[place.num_old :],
                        history=messages[: place.num_asked],
                        tools=ask.tools,
                    )
                if not isinstance(found, ForkReason):
                    reason = "" if after.is_tip else Rewritten.EDITED_HISTORY
                    is_extended = place.words is not None
                    return TurnPrompt([*more, *found], after, after.end, reason, is_extended=is_extended)
                reason = reason or found
            whole = encoded.whole if encoded is not None else None
            ids = self._codec.render(messages, ask.tools, own=own) if whole is None else whole
            return TurnPrompt(ids, reason=reason, is_rendered=True)
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(error) from error

    def _as_answered(self, place: PrefixMatch, ask: TurnRequest) -> tuple[list[Message], dict[int, int]]:
        """The request's messages, those that are answers of the policy with all that it said; and the places of the
        policy's own words, with the number of their characters. Whatever else stands there as the assistant's was put
        into its mouth."""
        messages = list(ask.messages)
        own = {number: len(text_of(messages[number])) for number in self._history.known(place)}
        for number, node in self._history.answered(place, messages, ask.tools).items():
            message = self._message(node.entry.number, place.chain[0], ask)
            own[number] = len(text_of(message))
            if more := self._added(node.entry, node.words or ""):
                message = {**message, "content": text_of(message) + more}
            messages[number] = message
        return messages, own

    def _added(self, entry: TurnEntry, words: str) -> str:
        """What of ``words`` a client has written behind the answer, and is not stored there."""
        if not words:
            return ""
        stored = self._codec.tokenizer.decode(self._tree.turns[entry.number].sampled)
        return added(words, stored, entry.stop_text)

    def _message(self, turn: int, tools_digest: bytes, ask: TurnRequest) -> Message:
        """Read once: each request holds all earlier turns."""
        tokens = self._tree.turns[turn]
        known = self._messages.get(turn)
        if known is None or known[:2] != (tools_digest, len(tokens.sampled)):
            known = tools_digest, len(tokens.sampled), self._codec.message(tokens.said, ask.tools)
            self._messages[turn] = known
        return known[2]


def _unreadable(error: Exception) -> Refusal:
    return Refusal(RefusalKind.INVALID, f"the messages cannot be read: {error}", param="messages")


def sampling_seed(ask: TurnRequest, turn: Turn) -> int | None:
    """What an agent's seed becomes for an engine: one number for all pieces of a turn, whoever asks for them.

    Below 2**31, which every kind of engine takes. None where the agent sent none. It is made of the seed and of the ids
    before the turn's first sampled token alone. So the same request draws the same numbers in a fresh conversation, at
    another gateway, after a retry, and behind a switch of weights; and an agent that sends one seed with everything
    draws other numbers in every turn and task, instead of the same ones everywhere. Which tokens those numbers make is
    the weights' business: log-probs and versions are recorded as for any other turn.
    """
    if ask.seed is None:
        return None
    digest = turn.branch.ids.digest(turn.num_prompt)
    text = f"{ask.seed}/{turn.num_prompt}/{digest}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


async def without_volatile(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    """``ask`` without what is found of ``patterns``, which are by their names.

    It is looked for in what the agent itself wrote, system and user messages, at a bounded number of places: who writes
    patterns, and texts for them, holds up nobody else.
    """
    if not patterns:
        return ask
    return await beside(ask, _without, ask, patterns) if is_long(ask) else _without(ask, patterns)


def _without(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    messages, left_out = [*ask.messages], list[str]()
    for name, pattern in patterns.items():
        if _leave_out(messages, pattern):
            left_out.append(name)
    if not left_out:
        return ask
    said = tuple(of_messages(messages)) if ask.said else ()
    return with_digest(replace(ask, messages=tuple(messages), left_out=tuple(left_out), said=said))


def _leave_out(messages: list[Message], pattern: str) -> bool:
    """Whether there was any of it."""
    parts, num_left, is_found = pattern.split("*"), MOST_PLACES, False
    for number, message in enumerate(messages):
        text = message.get("content")
        if message["role"] in ("system", "user") and isinstance(text, str) and all(part in text for part in parts):
            kept, num_places = cut(text, parts, num_left)
            num_left -= num_places
            if kept != text:
                messages[number] = {**message, "content": kept}
                is_found = True
    return is_found


def cut(text: str, parts: Sequence[str], most: int) -> tuple[str, int]:
    """``text`` without what is found of these parts, each the next one in the same line, and at how many places it was
    looked for. A line of which nothing is left is no line."""
    kept, at, line_end, before, num_places = list[str](), 0, 0, "\n", 0
    while num_places < most and (begin := text.find(parts[0], at)) >= 0:
        num_places += 1
        if begin >= line_end:
            line_end = _or_end(text, text.find("\n", begin))
        end = _end(text, begin + len(parts[0]), line_end, parts[1:])
        if end is None:  # nor is it found further on in this line
            kept.append(text[at:line_end])
            at, before = line_end, ""
            continue
        kept.append(text[at:begin])
        before = text[begin - 1] if begin > at else before
        is_line = before == "\n" and (end == line_end or text.startswith("\r\n", end))
        at = min(line_end + 1, len(text)) if is_line else end
    return "".join([*kept, text[at:]]), num_places


def _end(text: str, begin: int, line_end: int, parts: Sequence[str]) -> int | None:
    for number, part in enumerate(parts, start=1):
        if not part and number == len(parts):
            return line_end - text.endswith("\r", begin, line_end)
        found = text.find(part, begin, line_end)
        if found < 0:
            return None
        begin = found + len(part)
    return begin


def _or_end(text: str, place: int) -> int:
    return len(text) if place < 0 else place


def is_long(ask: TurnRequest) -> bool:
    return ask.num_bytes > LONG_BYTES


def may_be_too_long(ask: TurnRequest, num_most: int) -> bool:
    """Whether it is to be looked at before it is encoded."""
    return ask.num_bytes > MOST_BYTES_A_TOKEN * _MARGIN * num_most


async def beside(ask: TurnRequest, work: Callable[..., T], *given: object) -> T:
    """Beside the event loop."""
    threads = _FOR_HUGE if ask.num_bytes > _HUGE_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *given))


def num_beyond(ask: TurnRequest, encode: Callable[[str], Sequence[int]], num_most: int) -> int | None:
    """So many tokens at least, where they are more than twice as many as fit; None where they may be fewer.

    A text that is cut has other ids at its cuts alone, far fewer than what it is given beyond the limit. What the
    policy itself has said may be left out by a template, as far as it is a thought: all that is said is refused only
    where it is many times what fits.
    """
    for texts, times in ((_read_whole(ask), _MARGIN), (_all_texts(ask), _MOST_TIMES)):
        num_tokens = 0
        for piece in _pieces(texts):
            num_tokens += len(encode(piece))
            if num_tokens > times * num_most:
                return num_tokens // times
    return None


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), _PIECE_CHARS):
            yield text[begin : begin + _PIECE_CHARS]


def _read_whole(ask: TurnRequest) -> Iterator[str]:
    """Texts that every template shows the model: of its own words some leave out what it thought, and of others' the
    blanks around them."""
    yield from (tool["function"].get("description", "").strip() for tool in ask.tools)
    yield from (text_of(message).strip() for message in ask.messages if message["role"] != "assistant")


def _all_texts(ask: TurnRequest) -> Iterator[str]:
    yield from map(to_json, ask.tools)
    for message in ask.messages:
        yield text_of(message).strip()
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call)["arguments"]
            yield arguments if isinstance(arguments, str) else to_json(arguments)
