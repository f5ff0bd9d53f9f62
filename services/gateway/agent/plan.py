"""Plans how a request becomes a turn: which ids it is answered behind, and why, without changing anything.

Rule: where the stored ids can be gone on from, they are; only what cannot be is rendered anew. A long request is
encoded beside the event loop first, from copies; what its turn goes on from is decided after that, and where it is
something else by then, what was encoded is not used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gspo_core.chat import ChatCodec
from gspo_core.chat.text import text_of
from gspo_core.messages import ForkReason, Message
from services.episodes.matching import Beginnings, History, PrefixMatch, Rewritten, TurnEntry
from services.episodes.tree import TokenTree, TurnTokens
from services.episodes.written_back import added
from services.gateway.agent.lengths import beside, is_long, may_be_too_long, num_beyond
from services.gateway.dialects.turns import Refusal, RefusalKind, ToolChoice, TurnRequest


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """How a turn begins: the ids to read, and where they go."""

    token_ids: Sequence[int]
    """All that is read; the last ``num_begun`` of them begin the answer."""
    after: TurnTokens | None = None
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
        """Of the prompt: those that the turn's first segment holds. A fork reads anew what lies before it."""
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
        """Of turns: their messages, read with the tools of this digest from so many tokens."""

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
