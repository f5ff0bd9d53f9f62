"""Matches a request to the longest stored conversation, with its answer, that the request begins with.

Rule: a request that repeats what was answered goes on behind the stored ids. Where it says something else than what was
stored, the reason is named, and a new branch begins. An answer with its stop text, or with words behind it, is still
that answer, as far as the message begins with it, and the rest is read and not trained. So is one that a client writes
in its own way: with other blanks between its texts before and behind calls, or, where none is equal to the letter, with
numbers as JavaScript has them. Requests are known by digests, and answers by their length too: the client sends its
whole history each time, so nothing of it needs to be kept but the stop texts. It neither encodes nor samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gspo_core.chat.text import text_of
from gspo_core.messages import Message, ToolSchema
from services.episodes.fingerprints import (
    num_opening,
    of_answer,
    of_beginning,
    of_instructions,
    of_message,
    of_messages,
    of_opening,
    of_tools,
    prefixes,
)

_NO_TOOLS = of_tools(())
# Clients leave out an answer that has neither text nor calls.
_NOTHING = of_answer("", ())

# For one turn: each is kept, and looked for in each request.
MAX_REPEAT_KEYS = 64
# Answers of alike conversations that a new one may quote, and what it begins with: all are looked for there while no
# other request is answered. A summary is among the newest.
MAX_QUOTED = 64
MAX_QUOTING_CHARS = 64 << 10


class Rewritten(StrEnum):
    """Why a request cannot go on at the end of a branch; besides the reasons of the chat codec."""

    RESAMPLED = "resampled"
    """The request of a turn that was answered already, for another answer."""
    EDITED_HISTORY = "edited_history"
    """It goes on from a turn that others went on from, or a stored conversation stands in it with other words."""
    SUB_AGENT = "sub_agent"
    """A conversation of its own, with another beginning; its instructions may be known."""
    COMPACTED = "compacted"
    """It ends as a stored conversation does behind another beginning, or begins with what the policy said of one: with
    one of the newest ``MAX_QUOTED`` answers, within ``MAX_QUOTING_CHARS``."""
    TOOLS_CHANGED = "tools_changed"
    """A stored conversation, with other tools."""


class TurnEntry(msgspec.Struct, array_like=True):
    """One turn, without its tokens: what is kept of it beside them."""

    number: int
    request: bytes
    """Digest of the conversation that it answers, with its tools."""
    bare: bytes
    """As above, without the tools."""
    opening: bytes
    """Digest of what the conversation was begun with: its instructions and the first message that is none."""
    tail: bytes
    """Digest of its last message."""
    digest: str = ""
    """Digest of the whole request, as its dialect made it."""
    repeat_keys: list[str] = msgspec.field(default_factory=list)
    parent: int | None = None
    """The turn whose answer its conversation goes on from."""
    reason: str = ""
    """Why it began a new branch; empty where it did not, and in the first turn."""
    num_stored: int = 0
    """Tokens of its prompt that were stored before."""
    created_at: int = 0
    finish: str = ""
    """``stop`` or ``length`` once nothing more is sampled for it, where no stop token says so."""
    stop_text: str = ""
    """The text that ended it. Its tokens end with the token that completes it."""
    overlap: str = ""
    """In turns stored by an earlier release: the beginning of ``stop_text`` that the tokens end with."""
    answer: bytes = b""
    """Digest of its answer, once there is one."""
    num_calls: int = 0
    """Also those that cannot be read."""
    has_parse_error: bool = False
    delivered: bool = False
    """A client has all of it."""
    owed: bool = False
    """The agent began again from its first request: it is to get this turn once more."""
    num_repeats: int = 0
    """How often it was asked for again and given again."""
    num_begun: int = 0
    """Tokens at the end of its prompt that begin its answer: the request said how."""
    gives_no_calls: bool = False
    """What it calls is told as text: the request asked for no calls."""
    instructions: bytes = b""
    """Digest of what its conversation was instructed with; empty where an older release wrote it."""
    num_messages: int = 0
    """In its conversation; 0 where an older release wrote it."""
    num_told: int = -1
    """Characters of its answer's text, where more may stand behind it: it was not ended by a stop token."""
    gives_one_call: bool = False
    """What it calls behind its first call is told as text: the request asked for no more."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Where a request goes on."""

    said: Sequence[bytes]
    """Digest of each of its messages."""
    chain: Sequence[bytes]
    """Digest of each beginning of it, with its tools, from the empty one on."""
    bare: bytes
    again: TurnEntry | None = None
    """A turn that answers the same conversation."""
    parent: TurnEntry | None = None
    num_old: int = 0
    """Messages of the request that ``parent`` stands for, with its answer if that was sent."""
    num_asked: int = 0
    """Messages that ``parent`` answered."""
    reason: str = ""
    """Why it can only go on in a new branch, as far as the messages tell."""
    words: str | None = None
    """What the request has behind the answer of ``parent``; None: the answer is as it was told."""


@dataclass(frozen=True, slots=True)
class Node:
    """A turn whose conversation and answer a request begins with."""

    num_old: int
    """Messages of the request that it stands for."""
    entry: TurnEntry
    words: str | None = None
    """As ``PrefixMatch.words``."""


class Beginnings:
    """All beginnings of one request, which is looked for in many histories."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[ToolSchema], digests: Sequence[bytes] = ()) -> None:
        """As ``History.place``."""
        self.messages, self.tools = messages, tools
        self.said = digests or of_messages(messages)
        self.chain = prefixes(self.said, of_tools(tools))
        self.places = {digest: number for number, digest in enumerate(self.chain)}


class History:
    """The turns of one attempt."""

    def __init__(
        self,
        answer_of: Callable[[TurnEntry, Sequence[ToolSchema]], bytes],
        is_answer_in: Callable[[TurnEntry, str], bool],
        is_told_anew: Callable[[TurnEntry, Message, Sequence[ToolSchema]], bool],
    ) -> None:
        """``answer_of``: the digest of a turn's answer, read with these tools. ``is_answer_in``: whether a text quotes
        it. ``is_told_anew``: whether a message says it as some clients write it again."""
        self.entries: dict[int, TurnEntry] = {}
        self._answer_of = answer_of
        self._is_answer_in = is_answer_in
        self._is_told_anew = is_told_anew
        self._by_request: defaultdict[bytes, list[TurnEntry]] = defaultdict(list)
        self._by_bare: defaultdict[bytes, list[TurnEntry]] = defaultdict(list)
        self._by_digest: defaultdict[str, list[TurnEntry]] = defaultdict(list)
        self._by_repeat_key: dict[str, TurnEntry] = {}
        self._continued: set[int] = set()

    def add(self, entry: TurnEntry) -> None:
        self.entries[entry.number] = entry
        self._by_request[entry.request].append(entry)
        self._by_bare[entry.bare].append(entry)
        self._by_digest[entry.digest].append(entry)
        for repeat_key in entry.repeat_keys:
            self._by_repeat_key[repeat_key] = entry
        if entry.parent is not None:
            self._continued.add(entry.parent)

    def is_continued(self, entry: TurnEntry) -> bool:
        """Whether a later request goes on from it."""
        return entry.number in self._continued

    def equal(self, digest: str) -> Sequence[TurnEntry]:
        """The turns that were asked for by the same request, oldest first."""
        return self._by_digest.get(digest, ()) if digest else ()

    def named(self, repeat_key: str) -> TurnEntry | None:
        return self._by_repeat_key.get(repeat_key)

    def name(self, entry: TurnEntry, repeat_key: str) -> bool:
        """The same turn was asked for with one more key. False where it has too many."""
        if repeat_key and repeat_key not in self._by_repeat_key:
            if len(entry.repeat_keys) >= MAX_REPEAT_KEYS:
                return False
            entry.repeat_keys.append(repeat_key)
            self._by_repeat_key[repeat_key] = entry
        return True

    def place(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], digests: Sequence[bytes] = ()
    ) -> PrefixMatch:
        """``digests``: of the messages, where they are known. Raises ``ValueError`` for messages that cannot be
        read."""
        said = digests or of_messages(messages)
        chain = prefixes(said, of_tools(tools))
        bare = prefixes(said, _NO_TOOLS) if tools else chain
        if same := self._by_request.get(chain[-1]):
            again = same[-1]
            parent = None if again.parent is None else self.entries.get(again.parent)
            return PrefixMatch(said, chain, bare[-1], again, parent, reason=Rewritten.RESAMPLED)
        found = next(self._nodes(messages, said, chain, tools), None)
        if found is None:
            return PrefixMatch(said, chain, bare[-1], reason=self._why_new(messages, said, bare, chain))
        num_old, parent = found.num_old, found.entry
        reason = Rewritten.EDITED_HISTORY if self.is_continued(parent) else ""
        num_asked = num_old - (messages[num_old - 1]["role"] == "assistant")
        return PrefixMatch(said, chain, bare[-1], None, parent, num_old, num_asked, reason, found.words)

    def knows(self, request: Beginnings) -> bool:
        """Whether ``place`` finds a turn for it. It looks no oftener than there are turns."""
        if request.chain[-1] in self._by_request:
            return True
        places = request.places
        asked = sorted((places[one] for one in self._by_request.keys() & places.keys()), reverse=True)
        nodes = self._nodes(request.messages, request.said, request.chain, request.tools, asked)
        return next(nodes, None) is not None

    def answered(self, place: PrefixMatch, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> dict[int, Node]:
        """The messages that are answers of these turns, by their place."""
        nodes = self._nodes(messages, place.said, place.chain, tools)
        return {one.num_old - 1: one for one in nodes if messages[one.num_old - 1]["role"] == "assistant"}

    def known(self, place: PrefixMatch) -> list[int]:
        """The places of messages that say what some turn has answered, in whatever conversation."""
        answers = {entry.answer for entry in self.entries.values() if entry.answer}
        return [number for number, one in enumerate(place.said) if one in answers]

    def had(self, paid: Collection[int] = ()) -> set[int]:
        """Turns that the agent received: delivered to it, paid by it, or continued by a turn that it received."""
        had = {number for number in paid if number in self.entries}
        for number in sorted(self.entries, reverse=True):
            entry = self.entries[number]
            if number in had or entry.delivered:
                had.add(number)
                if entry.parent is not None:
                    had.add(entry.parent)
        return had

    def rejected(self, had: Collection[int], paid: Collection[int] = ()) -> set[int]:
        """Turns that the agent had and left: other samples of the request whose answer it went on from, or paid."""
        chosen = {self.entries[number].parent for number in had} | set(paid)
        samples = defaultdict[bytes, list[int]](list)
        for number in had:
            samples[self.entries[number].request].append(number)
        decided = (numbers for numbers in samples.values() if not chosen.isdisjoint(numbers))
        return {number for numbers in decided for number in numbers if number not in chosen}

    def _nodes(
        self,
        messages: Sequence[Message],
        said: Sequence[bytes],
        chain: Sequence[bytes],
        tools: Sequence[ToolSchema],
        asked: Sequence[int] | None = None,
    ) -> Iterator[Node]:
        """The turns whose conversation and answer these messages begin with, the longest first. ``asked``: behind how
        many messages turns were asked for, where that is known."""
        for number in range(len(messages) - 1, 0, -1) if asked is None else asked:
            entries = self._by_request.get(chain[number])
            if entries:
                is_answer = messages[number]["role"] == "assistant"
                answer = said[number] if is_answer else _NOTHING
                answers = [(entry, self._answer_of(entry, tools)) for entry in entries]
                equal = [entry for entry, found in answers if found == answer]
                whole = [entry for entry, found in answers if found]
                if not equal and is_answer:
                    equal = [entry for entry in whole if self._is_told_anew(entry, messages[number], tools)]
                if equal:
                    yield Node(number + is_answer, self._freshest(equal))
                elif is_answer and (extended := self._extended(whole, messages[number])) is not None:
                    yield Node(number + 1, *extended)

    def _extended(self, entries: Sequence[TurnEntry], message: Message) -> tuple[TurnEntry, str] | None:
        """The turn whose answer the message begins with, the longest, and what it says behind it."""
        words = {
            entry.number: found
            for entry in entries
            if entry.num_told >= 0
            if (found := words_behind(message, entry.answer, entry.num_told, entry.stop_text)) is not None
        }
        if not words:
            return None
        longest = max(self.entries[number].num_told for number in words)
        best = self._freshest(self.entries[number] for number in words if self.entries[number].num_told == longest)
        return best, words[best.number]

    def _freshest(self, equal: Iterable[TurnEntry]) -> TurnEntry:
        """Prefers a turn without a continuation; among several, or if all have one, the newest."""
        return max(equal, key=lambda entry: (not self.is_continued(entry), entry.number))

    def _why_new(
        self, messages: Sequence[Message], said: Sequence[bytes], bare: Sequence[bytes], chain: Sequence[bytes]
    ) -> str:
        if not self.entries:
            return ""
        has_same_tools = any(digest in self._by_request for digest in chain)
        if not has_same_tools and any(digest in self._by_bare for digest in bare):
            return Rewritten.TOOLS_CHANGED
        entries = self.entries.values()
        begun = num_opening(messages)
        if ends := self._ends(messages, said, begun):
            is_shorter = any(not entry.num_messages or num_before < entry.num_messages for entry, num_before in ends)
            return Rewritten.COMPACTED if is_shorter else Rewritten.EDITED_HISTORY
        opening, instructions = of_opening(messages, said), of_instructions(messages, said)
        if any(opening == entry.opening for entry in entries):
            return Rewritten.EDITED_HISTORY
        texts = [text_of(message)[:MAX_QUOTING_CHARS] for message in messages[:begun] if message["role"] != "system"]
        alike = [entry for entry in entries if entry.instructions == instructions][-MAX_QUOTED:]
        if any(self._is_answer_in(entry, text) for text in texts for entry in alike):
            return Rewritten.COMPACTED
        return Rewritten.SUB_AGENT

    def _ends(self, messages: Sequence[Message], said: Sequence[bytes], begun: int) -> list[tuple[TurnEntry, int]]:
        """The turns that answered the last message here, or gave the last answer, with the messages up to there."""
        if len(messages) == begun:
            return []
        tail, entries = of_message(messages[-1]), self.entries.values()
        ends = [(entry, len(messages)) for entry in entries if entry.tail == tail]
        answers = [place for place in range(begun, len(messages)) if messages[place]["role"] == "assistant"]
        for place in answers[-1:]:
            ends += [(entry, place) for entry in entries if entry.answer == said[place]]
        return ends


def words_behind(message: Message, answer: bytes, num_chars: int, stop_text: str) -> str | None:
    """What a message of the assistant says behind the answer with this digest and so many characters of text.

    None where it does not begin with that answer, or where nobody could tell: an answer of no words is known by the
    stop text that ended it alone. Only behind words can there be more: behind calls nothing but the stop text."""
    digest, words = of_beginning(message, num_chars)
    if digest != answer:
        return None
    behind = _behind_stop_text(words, stop_text)
    if message.get("tool_calls"):
        return None if behind is None or behind.strip() else words
    return None if behind is None and not num_chars else words


def added(words: str, stored: str, stop_text: str) -> str:
    """What of ``words``, which stand behind an answer as it was told, does not stand in the text that is stored."""
    place = stored.find(stop_text) if stop_text else -1
    behind = _behind_stop_text(words, stop_text)
    if place < 0:
        there = stored[len(stored.rstrip()) :]
    elif behind is not None:
        words, there = behind, stored[place:].partition(stop_text.strip())[2]
    else:
        there = "" if stop_text.strip() else stored[place:]
    return words.removeprefix(there)


def _behind_stop_text(words: str, stop_text: str) -> str | None:
    """None where they do not begin with it, blanks aside."""
    bare, begun = stop_text.strip(), words.lstrip()
    return begun.removeprefix(bare) if bare and begun.startswith(bare) else None
