"""The conversation of an episode: as messages for the chat format, and as tokens in its ledger.

Rule: the two never come apart. If new messages cannot be appended to the sampled tokens, a new branch begins with the
whole conversation rendered anew, and the reason is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

from gspo_core.chat import ChatCodec, NotText
from gspo_core.environment_contract import IMAGES, EnvironmentFailed, Start
from gspo_core.episode_limits import within
from gspo_core.messages import ForkReason, Message, ParsedTurn, ToolSchema
from gspo_core.types import Segment, StopReason
from services.episodes.counters import Counters
from services.episodes.ledger import Ledger
from services.episodes.worlds import WorldSnapshot


class Conversation:
    """The conversation of one attempt; ``ledger`` is empty at first."""

    def __init__(
        self,
        codec: ChatCodec,
        ledger: Ledger,
        counters: Counters,
        max_context_tokens: int,
        max_observation_chars: int,
    ) -> None:
        self.ledger = ledger
        self.messages: list[Message] = []
        self.tools: Sequence[ToolSchema] = ()
        self.num_prompt_tokens = 0
        """Of the first prompt, also of one that is too long."""
        self._codec = codec
        self._counters = counters
        self._max_context_tokens = max_context_tokens
        self._max_observation_chars = max_observation_chars

    @property
    def num_turns(self) -> int:
        """Including the open turn."""
        return len(self.ledger.turns)

    def begin(self, start: Start) -> StopReason | None:
        """Opens the first turn, or returns why it cannot."""
        self.messages, self.tools = list(start.messages), start.tools
        prompt = self._render()
        self.num_prompt_tokens = len(prompt)
        if len(prompt) >= self._max_context_tokens:
            return StopReason.CONTEXT_OVERFLOW
        self.ledger.observe(prompt)
        return None

    def go_on(self, world: WorldSnapshot, record: Sequence[Segment]) -> None:
        """Resumes from ``world``, with all of ``record``."""
        self.messages = list(cast(list[Message], world.messages))
        self.tools = cast(list[ToolSchema], world.tools)
        world.rebuild(self.ledger, record)

    def parse(self) -> ParsedTurn:
        """The last sampled turn."""
        return self._codec.parse(self.ledger.turns[-1].sampled, self.tools)

    def read(self, parsed: ParsedTurn, messages: Sequence[Message]) -> StopReason | None:
        """Opens the next turn with ``messages``, which answer ``parsed``."""
        codec, ledger = self._codec, self.ledger
        messages, num_cut = within(messages, self._max_observation_chars)
        if num_cut:
            self._counters.add("observations/cut", num_cut)
        sampled = ledger.turns[-1].sampled
        with _wording():
            bridge = codec.bridge(ledger.context, sampled, messages, history=self.messages, tools=self.tools)
        self.messages += [codec.message(sampled, self.tools, turn=parsed), *messages]
        if isinstance(bridge, ForkReason):
            self._counters.add("drift/forks")
            self._counters.add(f"drift/forks_{bridge}")
            token_ids = self._render()
            num_tokens, read = len(token_ids), ledger.fork
        else:
            token_ids = bridge
            num_tokens, read = ledger.num_tokens + len(token_ids), ledger.observe
        if num_tokens >= self._max_context_tokens:
            return StopReason.CONTEXT_OVERFLOW
        read(token_ids)
        return None

    def _render(self) -> list[int]:
        with _wording():
            return self._codec.render(self.messages, self.tools)


@contextlib.contextmanager
def _wording() -> Iterator[None]:
    """Turns errors of the chat format into failures: it may be unable to render what an environment shows."""
    try:
        yield
    except NotText as error:
        raise EnvironmentFailed(IMAGES, str(error)) from error
    except ValueError as error:
        raise EnvironmentFailed("prompt", str(error)) from error
