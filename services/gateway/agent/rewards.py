"""What an episode is worth: who may say so, and rewards that come after its end, with the end that they make of it.

Rule: the key by which an agent samples pays nothing unless the job trusts it with that; otherwise a policy that learns
one request has solved every task. No reward leaves the range that the environment states, nor does the sum of those
that were posted, at any time. What is refused is counted.

Any gateway can take a late reward, for all that it needs is in Redis. A reward counts once: whoever is first ends the
wait, and a token that was taken is known again. What waits too long ends without a reward, or with what its turns were
paid. It gives no episode a second chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal
from uuid import uuid4

import msgspec

from gspo_core.codec import decode
from gspo_core.environment_contract import BeyondBounds, check_size
from gspo_core.types import EpisodeKey, Outcome, Segment, StopReason
from services.episodes.keys import Named
from services.episodes.metering import Counters
from services.episodes.outbox import to_append
from services.episodes.snapshots import StoredReward
from services.gateway.agent.answers import turn_id, turn_number
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.state.queue import Bus
from services.state.queue_records import AwaitedReward, PostedReward, RewardWord
from services.state.retry import Retrier
from services.workers.ending import in_order

# Number of the format of ``EndedEpisode``.
SCHEMA = 1
# The most rewards of turns while an episode waits: they are kept in one record.
MAX_REWARDS = 1024
Source = Literal["returned", "judge", "posted"]
"""As a job says it; with None whoever started the agent may post, and the judge's word, or what the agent returned,
stands where nobody did."""


class Payer(msgspec.Struct, frozen=True):
    """What is taken for one episode."""

    source: Source | None = None
    lowest: float = -math.inf
    highest: float = math.inf

    def check(self, value: float, *, by_own_key: bool) -> None:
        """A reward that is posted. Raises ``Refusal``."""
        if self.source in ("returned", "judge"):
            where = "what its agent returns" if self.source == "returned" else "its judge's"
            raise Refusal(RefusalKind.INVALID, f"the reward of this episode is {where} alone", param="reward")
        if by_own_key and self.source != "posted":
            raise Refusal(
                RefusalKind.INVALID,
                "the key that samples pays nothing: post with the reward_key, which whoever starts the agent is "
                "given, or say `rewards: posted` under the job's `agent`",
                param="reward",
            )
        if not self.lowest <= value <= self.highest:
            raise Refusal(RefusalKind.INVALID, f"{value:g} is outside {self.range_text}", param="reward")
        try:
            check_size("the reward", value)
        except BeyondBounds as error:
            raise Refusal(RefusalKind.INVALID, str(error), param="reward") from None

    @property
    def range_text(self) -> str:
        return f"the reward_range ({self.lowest:g}, {self.highest:g}) of its environment"

    def total(self, values: Iterable[float]) -> float:
        """Adds up the rewards of an episode. Raises ``ValueError``."""
        try:
            found = math.fsum(values)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise ValueError("its rewards have no finite sum")
        if not self.lowest <= found <= self.highest:
            raise ValueError(f"its rewards are {found:g} in all, outside {self.range_text}")
        check_size("the sum of its rewards", found)
        return found

    def total_with(self, values: Iterable[float]) -> float:
        """As ``total``, of all that is posted and of one that comes now. Raises ``Refusal``."""
        try:
            return self.total(values)
        except ValueError as error:
            raise Refusal(RefusalKind.INVALID, f"with this one {error}", param="reward") from None


ANYBODY = Payer("posted")
"""The payer of episodes that ended under an earlier release: rewards by any key are taken."""


class EndedEpisode(msgspec.Struct, frozen=True):
    """An episode that has ended but for its reward. Nothing of it was paid before: else that would be its reward.

    Fields may be added with a default: records of earlier releases, which lack them, are read as well."""

    stop: StopReason
    cost: float
    """What its length costs, taken off its reward."""
    turns: list[int]
    """Those that can be paid."""
    payer: Payer = ANYBODY
    untrained: dict[int, int | None] = {}
    """Turns that the agent did not have, or went on beside, and what each goes on from: whoever pays one had it."""
    schema: int = SCHEMA

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EndedEpisode:
        found = msgspec.msgpack.decode(data, type=cls)
        if found.schema != SCHEMA:
            raise Refusal(RefusalKind.AWAY, "another release keeps this episode; ask again")
        return found

    def end(self, last: Segment, posted: Sequence[PostedReward], final: float | None) -> Segment:
        """The last segment with a reward; without a final one the episode was paid by the turn. Raises ``Refusal``
        where the sum of all leaves the range."""
        by_turn = {paid.turn: sum(one.value for one in posted if one.turn == paid.turn) for paid in posted}
        parts = {f"turn/{turn}": value for turn, value in sorted(by_turn.items())}
        if self.cost:
            parts["overlong"] = -self.cost
        reward = self.payer.total_with([final or 0.0, *by_turn.values()]) - self.cost
        awaiting = last.outcome or Outcome(StopReason.NO_REWARD)
        untrained = tuple(turn for turn in last.untrained_turns if turn not in self._had_by(by_turn))
        metrics = {**awaiting.metrics, "untrained_turns": float(len(untrained))} if by_turn else awaiting.metrics
        outcome = Outcome(self.stop, reward, parts, metrics, awaiting.evidence)
        return replace(last, outcome=outcome, turn_rewards=in_order(by_turn), untrained_turns=untrained)

    def _had_by(self, paid: Iterable[int]) -> set[int]:
        """Untrained turns that were paid, and those that they continue."""
        had = set[int]()
        for turn in paid:
            at: int | None = turn
            while at in self.untrained and at not in had:
                had.add(at)
                at = self.untrained[at]
        return had


def what_it_says(value: float, turn: str) -> str:
    """Describes a reward; the same whenever it is sent."""
    return f"{turn}={(value + 0.0).hex()}"  # -0.0 is 0.0


class LateRewards:
    """``post`` what came for an episode that no process holds."""

    def __init__(self, bus: Bus, retrier: Retrier, counters: Counters, now: Callable[[], float]) -> None:
        """``now``: Unix seconds."""
        self._bus = bus
        self._retrier = retrier
        self._counters = counters
        self._now = now

    async def post(self, named: Named, value: float, turn: str, token: str) -> RewardWord:
        """``PLAYING`` or ``TAKEN``; raises ``Refusal`` otherwise."""
        key, attempt = named.episode, named.attempt
        name = token or f"-{uuid4().hex}"  # so that a call whose reply was lost is known again
        said = what_it_says(value, turn)
        keep_trying, counters = self._retrier.keep_trying, self._counters
        word: RewardWord | AwaitedReward = RewardWord.CHANGED
        while word is RewardWord.CHANGED:
            look = partial(self._bus.look_at_reward, said=said, epoch=attempt.epoch)
            word = await keep_trying(look, key, attempt.number, name, self._now())
            if isinstance(word, AwaitedReward):
                word = await self._take(named, word, value, turn, name, said)
        if word in (RewardWord.LATE, RewardWord.ENDED):
            counters.add(f"rewards/refused_{word}")
            why = "the deadline for its reward is over" if word is RewardWord.LATE else "this episode has ended"
            raise Refusal(RefusalKind.ENDED, why)
        if word is RewardWord.CONFLICT:
            counters.add("rewards/refused")
            raise Refusal(RefusalKind.INVALID, "another reward was posted with this token", param="token")
        if word is RewardWord.TAKEN:
            counters.add("rewards/late")
        return RewardWord.PLAYING if word is RewardWord.PLAYING else RewardWord.TAKEN

    async def remember(self, key: EpisodeKey, attempt: int, worker: str, posted: Sequence[StoredReward]) -> None:
        """Keeps what an episode was paid that is about to end, by the token of its worker's lease. One that is sent
        again with its token is answered as it was. Raises what storing segments does."""
        paid = [(one, "" if one.turn is None else turn_id(attempt, one.turn)) for one in posted if one.token]
        said = {one.token: what_it_says(one.value, turn) for one, turn in paid}
        if said:
            await self._retrier.keep_trying(self._bus.remember_rewards, key, worker, attempt, said)

    async def _take(
        self, named: Named, awaited: AwaitedReward, value: float, turn: str, token: str, said: str
    ) -> RewardWord:
        ended, last = EndedEpisode.decode(awaited.kept), decode(awaited.payload)
        keep_trying, seen = self._retrier.keep_trying, len(awaited.posted)
        try:
            ended.payer.check(value, by_own_key=not named.pays)
            reward = _of_turn(named, ended, awaited, value, turn, token) if turn else None
            posted = awaited.posted if reward is None else (*awaited.posted, reward)
            end = to_append(ended.end(last, posted, None if turn else value), "")
        except Refusal:
            self._counters.add("rewards/refused")
            raise
        if reward is None:
            return await keep_trying(self._bus.settle_reward, end, token, said=said, seen=seen, now=self._now())
        return await keep_trying(self._bus.post_reward, end, reward, said=said, seen=seen, now=self._now())


def _of_turn(
    named: Named, ended: EndedEpisode, awaited: AwaitedReward, value: float, turn: str, token: str
) -> PostedReward:
    """Raises ``Refusal``."""
    number, seen = turn_number(named.attempt.number, turn), len(awaited.posted)
    if number is None or number not in ended.turns:
        raise Refusal(RefusalKind.INVALID, f"this episode has no turn {turn}", param="turn")
    if seen >= MAX_REWARDS:
        raise Refusal(RefusalKind.OVER_BUDGET, f"this episode was paid {seen} times since its end: at most that")
    return PostedReward(token, number, value)
