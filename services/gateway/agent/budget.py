"""What an agent's episode may still have: turns, calls, tokens, time; and what ends a turn.

Rule: a limit refuses the next request by name, and never takes back what was given. Tokens that are being sampled are
counted before they are there, so turns side by side stay within the limits together: a turn to which they leave nothing
waits for what becomes of them. Only what was sampled spends a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterator

from gspo_core.codec import MAX_SEGMENT_TOKENS
from gspo_core.episode_limits import limit_met
from gspo_core.types import StopReason
from services.episodes.metering import Meter
from services.episodes.tree import TokenTree
from services.gateway.agent.live import LiveTurn
from services.gateway.agent.plan import TurnPrompt
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.workers.setting import EpisodeSpec


class Budget:
    def __init__(self, order: EpisodeSpec, tree: TokenTree, meter: Meter, stop_ids: Collection[int]) -> None:
        self.stopped: StopReason | None = None
        """The limit that the last request, or the last turn, met."""
        self._order = order
        self._tree = tree
        self._meter = meter
        self._stop_ids = stop_ids
        self._num_reserved = 0
        """Tokens that may come from what is being sampled."""
        self._released = asyncio.Event()

    def check(self, num_turns: int, num_calls: int) -> None:
        """Raises ``Refusal`` where the episode may have no further turn."""
        limits = self._order.limits
        met = {
            StopReason.MAX_TURNS: num_turns >= limits.max_turns,
            StopReason.MAX_TOOL_CALLS: num_calls > limits.max_tool_calls,
            StopReason.MAX_TOKENS: self._tree.num_sampled >= limits.max_episode_tokens,
            StopReason.EPISODE_TIMEOUT: self._meter.spent_s > limits.episode_timeout_s,
            StopReason.REPETITION: self.stopped is StopReason.REPETITION,
        }
        for reason, is_met in met.items():
            if is_met:
                self.stopped = reason
                raise Refusal(RefusalKind.OVER_BUDGET, f"rollout stopped: {reason}")

    def check_prompt(self, prompt: TurnPrompt) -> None:
        """Raises ``Refusal`` where nothing may be sampled behind it, or nothing could be stored with it."""
        if prompt.num_prompt >= self._order.max_context_tokens:
            raise self.overflow(prompt.num_prompt)
        if prompt.num_unsealed >= MAX_SEGMENT_TOKENS:
            raise self.overflow(f"{prompt.num_unsealed} new", MAX_SEGMENT_TOKENS)

    def overflow(self, num_tokens: int | str, most: int | None = None) -> Refusal:
        self.stopped = StopReason.CONTEXT_OVERFLOW
        return self.too_long(num_tokens, most)

    def too_long(self, num_tokens: int | str, most: int | None = None) -> Refusal:
        """``most``: None for the job's own limit."""
        most = self._order.max_context_tokens if most is None else most
        message = f"the conversation has {num_tokens} tokens; it must have fewer than {most}"
        return Refusal(RefusalKind.TOO_LONG, message, param="messages")

    @contextlib.contextmanager
    def reserved(self, num_tokens: int) -> Iterator[None]:
        self._num_reserved += num_tokens
        try:
            yield
        finally:
            self._num_reserved -= num_tokens
            released, self._released = self._released, asyncio.Event()
            released.set()

    async def until_room(self, turn: LiveTurn) -> bool:
        """Whether ``turn``, which goes on, has room at once. If not, it has waited for tokens that may not have come:
        look again how it ends."""
        if self.room(turn) > 0:
            return True
        await self._released.wait()
        return False

    def ending(self, turn: LiveTurn) -> str | None:
        """How the turn ended, if nothing more is sampled for it."""
        sampled = turn.tokens.sampled
        if turn.entry.finish:
            return turn.entry.finish
        if sampled and sampled[-1] in self._stop_ids:
            return "stop"
        if not turn.tokens.is_tip:
            return "length"
        if (why := self._exhausted(turn)) is not None:
            self.stopped = why
            return "length"
        return "length" if self._room_of_turn(turn) <= 0 else None

    def _exhausted(self, turn: LiveTurn) -> StopReason | None:
        """The limit of the episode that ends the turn."""
        limits, tokens = self._order.limits, turn.tokens
        if met := limit_met(limits, tokens.sampled, len(tokens.branch.ids), self._order.max_context_tokens):
            return met
        if self._tree.num_sampled >= limits.max_episode_tokens:
            return StopReason.MAX_TOKENS
        return StopReason.EPISODE_TIMEOUT if self._meter.spent_s > limits.episode_timeout_s else None

    def _room_of_turn(self, turn: LiveTurn) -> int:
        asked = math.inf if turn.ask.max_tokens is None else turn.ask.max_tokens
        return int(min(self._order.max_turn_tokens, asked)) - len(turn.tokens.sampled)

    def room(self, turn: LiveTurn) -> int:
        left = self._order.limits.max_episode_tokens - self._tree.num_sampled - self._num_reserved
        in_context = self._order.max_context_tokens - len(turn.tokens.branch.ids)
        return min(self._room_of_turn(turn), left, in_context, MAX_SEGMENT_TOKENS - turn.tokens.num_unsealed)
