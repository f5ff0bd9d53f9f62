"""One request of an agent and its answer, in no dialect: what every dialect is read into and written from.

Rule: these types name no HTTP and no wire format. An answer is durable before anything of it leaves the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias

from gspo_core.messages import Message, ToolCall, ToolSchema
from services.episodes.policy import Span

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer is to call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    """``required``: its turn is begun as a call. ``none``: nothing in it is given as a call."""
    name: str = ""
    """The tool to call, where one is required by its name."""


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for: the next turn of a conversation, whose whole history it sends each time."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    choice: ToolChoice = AUTO
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the turn; they are not part of the answer."""
    digest: str = ""
    """Covers everything above, and ``seed``. Equal requests have equal digests, whatever dialect or transport they came
    by."""
    repeat_key: str = ""
    """A key that the client chose: asked again with it, the answer is the same. Empty: none."""
    is_retry: bool = False
    """The client says that it sends this request again because it got no answer."""
    user: str = ""
    """Whom the client asks for, by its own name for them; no part of the digest."""
    dialect: str = ""
    """In which it was written."""
    model: str = ""
    """That it named."""
    single_call: bool = False
    """The turn ends with its first call."""
    dropped: tuple[str, ...] = ()
    """Names of texts that were left out because they differ from one request to the next; no part of the digest."""
    left_out: tuple[str, ...] = ()
    """As above, of those that the job names."""
    unsupported: tuple[Refusal, ...] = ()
    """What of the request is not done here, which the job has refused or said; no part of the digest."""
    said: tuple[bytes, ...] = ()
    """Digest of each message, where it was made with the request; no part of the digest."""
    num_bytes: int = 0
    """The size of its content, where that was counted; no part of the digest."""
    seed: int | None = None
    """Decides, with the ids of the prompt, what is sampled under given weights; any number. None: chance does."""


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_stored_tokens: int
    """Prompt tokens that were stored before, so that this request did not encode them."""
    num_sampled_tokens: int
    num_reasoning_tokens: int = 0
    """Counted among the sampled ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole turn of the policy."""

    id: str
    """The same whenever this turn is given again."""
    text: str
    calls: tuple[ToolCall, ...]
    """Those that can be read as calls; what cannot be read stays in ``text`` as it was sampled."""
    call_ids: tuple[str, ...]
    """One for each call, unique in the episode."""
    finish: Finish
    usage: Usage
    versions: tuple[Span, ...]
    created_at: int
    """Unix seconds."""
    reasoning: str = ""
    stop_text: str = ""
    """The one of ``TurnRequest.stop`` that ended the turn, where one did."""
    num_behind: int = 0
    """Characters at the end of ``text`` that are told behind the calls: what was written there and is no call."""

    @property
    def before(self) -> str:
        """The text that is told before the calls."""
        return self.text[: len(self.text) - self.num_behind]

    @property
    def behind(self) -> str:
        """The text that is told behind the calls."""
        return self.text[len(self.text) - self.num_behind :]

    @property
    def named_calls(self) -> tuple[tuple[str, ToolCall], ...]:
        """Each with its id."""
        return tuple(zip(self.call_ids, self.calls, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the answer, as it becomes certain.

    The pieces of a turn, put together, begin its whole reasoning, text and calls; they need not reach their ends. A
    call comes whole, behind all text that is told before it.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ToolCall], ...] = ()
    """Each with its id."""
    behind: str = ""
    """Text behind the calls."""


def call_id(turn: str, place: int) -> str:
    """Names the call at ``place`` in the turn with this id."""
    return f"call{turn.removeprefix('turn')}_{place}".replace("-", "_")


class RefusalKind(StrEnum):
    """Why a request is not answered; each dialect has its own words for them."""

    INVALID = "invalid"
    """The request cannot be acted on as it is."""
    UNKNOWN_KEY = "unknown_key"
    OVER_BUDGET = "over_budget"
    """The episode has had all its turns, tokens or time: no further request will be answered."""
    ENDED = "ended"
    """The episode has its outcome, or another attempt of it is playing."""
    TOO_LONG = "too_long"
    """The conversation does not fit the model's context."""
    TOO_MANY = "too_many"
    """The key has too many requests open, or too much is being read; the same request may be sent again."""
    AWAY = "away"
    """Not now; the same request may be sent again."""


OVER = "this episode has ended, was erased, or began again with another key"
ERASED = "this episode was erased: nothing that was said in it is kept, and nothing more is answered"


class Refusal(Exception):
    """A request that is not answered. ``may_retry`` tells the client whether to send it again by itself."""

    def __init__(self, kind: RefusalKind, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        """The field of the request that is to blame, by its name in the dialect that it came by."""

    @property
    def may_retry(self) -> bool:
        return self.kind in (RefusalKind.AWAY, RefusalKind.TOO_MANY)


class PendingAnswer(Protocol):
    """An answer on its way. Pieces come while the policy samples; the last item is the whole answer.

    Whoever takes items may stop in the middle (its connection broke): sampling goes on, and the turn is kept as one
    that was not delivered. ``delivered`` says that the client has all of it. Taking an item may wait without a bound,
    while engines or weights are away, and may raise ``Refusal``.
    """

    @property
    def id(self) -> str:
        """That of the answer to come."""
        ...

    async def whole(self) -> Answer:
        """The last item, for who needs no pieces."""
        ...

    @property
    def created_at(self) -> int:
        """That of the answer to come."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """That it is an answer to."""
        ...

    @property
    def trace(self) -> str:
        """The conversation that keeps it, by the id that the API has for it; empty in an episode."""
        ...

    @property
    def left_out(self) -> Sequence[str]:
        """``TurnRequest.left_out`` of the request."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece | Answer]: ...

    async def delivered(self) -> None: ...

    def dropped(self) -> None:
        """The connection broke before the client had all of it. Harmless after ``delivered``."""
        ...


class Turns(Protocol):
    """What the HTTP side needs of the episodes."""

    async def ask(self, key: str, ask: TurnRequest) -> PendingAnswer:
        """Waits while the episode of ``key`` is brought back here, up to a bound: nothing can be said to the client
        meanwhile. Raises ``Refusal``."""
        ...

    async def count_tokens(self, key: str, ask: TurnRequest) -> int:
        """The tokens of the prompt that ``ask`` would become; nothing is sampled or recorded. Raises ``Refusal``."""
        ...

    async def model_names(self, key: str) -> tuple[str, ...]:
        """Names under which agents may ask for the policy. Raises ``Refusal``, also where the key's episode is known to
        be over."""
        ...

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        """Stores a reward of the episode, or of the turn with the id ``turn``. Equal ``token``: the same reward again.

        Raises ``Refusal``.
        """
        ...

    async def finish(self, key: str) -> None:
        """The agent is done. Raises ``Refusal``."""
        ...
