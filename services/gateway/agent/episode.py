"""One attempt of an episode that an agent drives: its requests become turns, each sampled once and durable.

Rule: what a request goes on from is decided before anything is sampled for it, and stored in one with its first tokens;
sampling goes on side by side; tokens are stored in the order in which they are numbered, before any of them is given
out. A request that repeats another gets its turn, not a new one. It decides neither when the episode ends nor what it
is worth.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

import msgspec

from gspo_core.messages import ToolSchema
from gspo_core.types import MAX_ASKED_CHARS, Asked, EpisodeKey, Segment, StopReason
from services.engines.protocol import ContextFull
from services.episodes.fingerprints import of_key
from services.episodes.keys import AttemptId
from services.episodes.matching import MAX_REPEAT_KEYS, Beginnings, History, PrefixMatch, Rewritten, TurnEntry
from services.episodes.metering import Meter
from services.episodes.policy import Drained, Sampled
from services.episodes.reading import first_call_end, head, stop_text_end
from services.episodes.snapshots import (
    RewardRefused,
    Rewards,
    SnapshotTooLarge,
    StoredReward,
    TreePart,
    TreeParts,
    TreeSnapshot,
    check_room,
)
from services.episodes.tree import TokenTree, Turn
from services.gateway.agent.answers import Answers
from services.gateway.agent.budget import Budget
from services.gateway.agent.live import Deciding, Delivery, LiveTurn, in_turn
from services.gateway.agent.plan import Encoded, TurnPlanner, TurnPrompt, sampling_seed, without_volatile
from services.gateway.agent.rewards import Payer
from services.gateway.dialects.turns import ERASED, Refusal, RefusalKind, TurnRequest
from services.state.queue import Kept, Snapshot
from services.state.refusals import EpisodeErased
from services.workers.setting import EpisodeSetting, EpisodeSpec

# What is sampled behind a turn's end is thrown away, so where a text or a call may be one, pieces are as long as what
# was sampled before them, and so long at least: no more is thrown away than is kept, in a few requests to an engine.
STOP_CHUNK_TOKENS = 32
# The size at which a reward is kept, without its token.
_REWARD_BYTES = 32
_FREE: AbstractAsyncContextManager[None] = nullcontext()
# How long an ended episode waits for answers that are being sent.
LAST_DELIVERY_S = 5.0


class AgentEpisode:
    """``ask`` until ``seal``. ``failure`` is set by the first error that ends the attempt."""

    def __init__(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        tree: TokenTree,
        meter: Meter,
        now: Callable[[], float],
        stop_chunk_tokens: int = STOP_CHUNK_TOKENS,
    ) -> None:
        """``now``: Unix seconds. ``stop_chunk_tokens``: so many at first where a text may end the turn."""
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.finished = asyncio.Event()
        """The agent said that it is done."""
        self.rewards = Rewards()
        low, high = order.reward_range or (-math.inf, math.inf)
        self.payer = Payer(order.rewards_from, low, high)
        self._setting = setting
        self._order = order
        self._tree = tree
        self._meter = meter
        self._now = now
        self._stop_chunk_tokens = stop_chunk_tokens
        self._answers = Answers(setting.codec, tree)
        self.history = History(self._digest, self._answers.is_in, self._answers.is_told_anew)
        self._plan = TurnPlanner(setting.codec, tree, self.history)
        self._budget = Budget(order, tree, meter, setting.codec.stop_ids)
        self._live: dict[int, LiveTurn] = {}
        self._deciding: Deciding = {}
        """Requests without a turn yet, of which long ones take their time, by their digest."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._next_turn = 0
        self._parts = TreeParts()
        self._is_finished = False
        self.num_requests = 0
        """Requests of any kind: each is a sign of life."""
        self.num_rewards_refused = 0
        self._num_refused_again = 0
        """Refusals that an agent which began again is about to repeat; they are not counted twice."""
        self.is_sealed = False
        """No later request is answered."""

    @property
    def key(self) -> EpisodeKey:
        return self._tree.key

    @property
    def attempt(self) -> int:
        return self._tree.attempt

    @property
    def named(self) -> AttemptId:
        """As its key names it."""
        return AttemptId(self._order.lease.epoch, self._tree.attempt)

    @property
    def stopped(self) -> StopReason | None:
        """The limit that the last request, or the last turn, met."""
        return self._budget.stopped

    @property
    def is_idle(self) -> bool:
        """Nothing is sampled or on its way to a client, and no request is on its way to its turn."""
        return not self._live and not self._deciding

    def restore(self, record: Sequence[Segment], kept: TreeSnapshot, *, begins_again: bool) -> None:
        """Goes on from what another gateway made durable. ``begins_again``: the agent does, from its first request."""
        for segment in record:
            self._tree.restore(segment)
        self.rewards = Rewards.come_again(kept.rewards) if begins_again else Rewards(kept.rewards)
        self.num_rewards_refused = kept.num_refused
        self._num_refused_again = kept.num_refused if begins_again else 0
        self._budget.stopped = StopReason(kept.stopped) if kept.stopped else None
        if kept.finished:
            self._is_finished = True
            self.finished.set()
        self._parts.restore(kept, self._tree.turns)
        for entry in kept.turns:
            if entry.number in self._tree.turns:  # nothing was sampled for the others
                if begins_again:
                    entry.delivered, entry.owed = False, True
                if begins_again or not entry.answer:
                    self._parts.touch(entry.number)
                self._tree.turns[entry.number].num_begun = entry.num_begun
                self.history.add(entry)
        self._next_turn = max(self._tree.turns, default=-1) + 1

    # what agents ask for

    async def ask(self, ask: TurnRequest, charged: AbstractAsyncContextManager[None] = _FREE) -> Delivery:
        """``charged``: within it a turn begins, once nothing is to be waited for any more."""
        if ask.max_tokens is not None and ask.max_tokens < 1:
            raise Refusal(RefusalKind.INVALID, "max_tokens must be at least 1", param="max_tokens")
        if ask.repeat_key:
            ask = replace(ask, repeat_key=of_key(ask.repeat_key))
        self._check_open()
        self._check_supported(ask)
        if (num_beyond := await self._num_beyond(ask)) is not None:
            self._budget.check(len(self.history.entries), self.num_calls)
            raise self._budget.overflow(f"more than {num_beyond}")
        ask = await without_volatile(ask, self._order.volatile)
        # Else a retry would be a turn, and so would what it repeats.
        async with in_turn(self._deciding, ask.digest):
            encoded = await self._plan.encoded(ask)
            async with charged:
                self._check_alive()
                turn = self._again(ask) or self._begin(ask, encoded)
        delivery = Delivery(turn, self._keep_delivery, self._setting.counters, self._let_go)
        delivery.left_out = ask.left_out
        return delivery

    async def _num_beyond(self, ask: TurnRequest) -> int | None:
        """So many tokens at least, where they are far too many."""
        found = await self._plan.num_beyond(ask, self._order.max_context_tokens)
        self._check_alive()
        return found

    def knows(self, ask: TurnRequest, beginnings: Beginnings | None) -> bool:
        """Whether ``ask`` repeats a request, or goes on from a turn. ``beginnings``: of its messages; None where they
        cannot be read."""
        history, key = self.history, of_key(ask.repeat_key)
        if (key and history.named(key) is not None) or (ask.is_retry and history.equal(ask.digest)):
            return True
        return beginnings is not None and self._plan.knows(beginnings)

    def gives_again(self, ask: TurnRequest) -> bool:
        """Whether ``ask`` gets a turn that it was given, or was to be given, before."""
        key = of_key(ask.repeat_key)
        return (bool(key) and self.history.named(key) is not None) or self._repeated(ask) is not None

    async def count_tokens(self, ask: TurnRequest) -> int:
        """Counts the tokens of the prompt that ``ask`` would become."""
        self._check_open()
        self._check_supported(ask)
        if (num_beyond := await self._num_beyond(ask)) is not None:
            raise self._budget.too_long(f"more than {num_beyond}")
        ask = await without_volatile(ask, self._order.volatile)
        encoded = await self._plan.encoded(ask)
        return self._plan.beginning(self._plan.place(ask), ask, encoded).num_prompt

    async def reward(self, value: float, turn: str = "", token: str = "", *, pays: bool = False) -> None:
        """``pays``: by the key that is for rewards."""
        async with self._writing:
            self._check_open()
            try:
                reward = self._checked(value, turn, token, pays=pays)
            except Refusal:
                self.count_refused_reward()
                if self.num_rewards_refused.bit_count() == 1:  # others with what is kept next: no write for each
                    await self._save()
                raise
            if reward is not None:
                if not self.rewards.comes_again(reward):
                    self._check_room(len(token.encode()) + _REWARD_BYTES)
                self.rewards.add(reward)
            await self._save()

    def count_refused_reward(self) -> None:
        if self._num_refused_again:
            self._num_refused_again -= 1
            return
        self.num_rewards_refused += 1
        self._setting.counters.add("rewards/refused")

    def _checked(self, value: float, turn: str, token: str, *, pays: bool) -> StoredReward | None:
        """The reward; None where it is posted already. Raises ``Refusal``."""
        self.payer.check(value, by_own_key=not pays)
        number = self._answers.number_of(turn) if turn else None
        if turn and not (number in self.history.entries and self._tree.turns[number].sampled):
            raise Refusal(RefusalKind.INVALID, f"this episode has no turn {turn}", param="turn")
        reward = StoredReward(token, number, float(value))
        try:
            if self.rewards.knows(reward):
                return None
        except RewardRefused as error:
            raise Refusal(RefusalKind.INVALID, str(error), param="reward") from None
        self.payer.total_with(self.rewards.amounts_with(reward))
        return reward

    async def finish(self) -> None:
        """It is kept before anybody hears of it."""
        async with self._writing:
            self._check_open()
            self._is_finished = True
            await self._save()
        self.finished.set()

    def _check_open(self) -> None:
        self.num_requests += 1
        self._check_alive()

    def _check_alive(self) -> None:
        if self.is_sealed:
            raise Refusal(RefusalKind.ENDED, "this episode has ended")
        if self.failure.done():
            raise self._lost()

    def _check_supported(self, ask: TurnRequest) -> None:
        if not ask.unsupported:
            return
        if not self._order.says_unsupported:
            raise ask.unsupported[0]
        self._setting.counters.add("fields/passed_over", len(ask.unsupported))

    def told(self, number: int) -> Sequence[int]:
        """Ids to read the turn of this number of as its agent has it."""
        return self._answers.told(self.history.entries[number])

    # which turn a request is

    def _again(self, ask: TurnRequest) -> LiveTurn | None:
        """The turn that was asked for by the same request, if this is no request for another one."""
        entry = self.history.named(ask.repeat_key) if ask.repeat_key else None
        if entry is not None and entry.digest != ask.digest:
            raise Refusal(RefusalKind.INVALID, "this idempotency key was used for another request")
        entry = entry or self._repeated(ask)
        if entry is None:
            return None
        self._parts.touch(entry.number)
        if not self.history.name(entry, ask.repeat_key):
            message = f"this request was sent with {MAX_REPEAT_KEYS} idempotency keys: send one of them again"
            raise Refusal(RefusalKind.INVALID, message, param="Idempotency-Key")
        self._setting.counters.add("turns/repeated")
        entry.num_repeats += 1
        turn = self._live.get(entry.number)
        return turn or self._alive(entry, self._tree.turns[entry.number], ask)

    def _repeated(self, ask: TurnRequest) -> TurnEntry | None:
        equal = self.history.equal(ask.digest)
        if ask.is_retry and equal:
            return min(equal, key=lambda entry: (entry.delivered, self._is_on_its_way(entry), -entry.number))
        return next((entry for entry in equal if self._is_undelivered(entry)), None)

    def _is_undelivered(self, entry: TurnEntry) -> bool:
        is_lost = not entry.delivered and not self.history.is_continued(entry)
        return (entry.owed or is_lost) and not self._is_on_its_way(entry)

    def _is_on_its_way(self, entry: TurnEntry) -> bool:
        return entry.number in self._live and bool(self._live[entry.number].deliveries)

    # a new turn

    def _begin(self, ask: TurnRequest, encoded: Encoded | None) -> LiveTurn:
        self._budget.check(len(self.history.entries), self.num_calls)
        place = self._plan.place(ask)
        beginning = self._plan.beginning(place, ask, encoded)
        self._budget.check_prompt(beginning)
        entry = self._answers.entry(self._next_turn, place, ask, int(self._now()))
        entry.reason, entry.num_stored = beginning.reason, beginning.num_stored
        entry.num_begun = beginning.num_begun
        self._check_room(len(msgspec.msgpack.encode(entry)))
        self._budget.stopped = None
        self._parts.touch(entry.number)
        self._next_turn += 1
        if place.parent is not None and place.parent.number in self._tree.turns:
            self._close(place.parent)
        for name in ask.dropped:
            self._setting.counters.add(f"drift/dropped_{name}")
        if ask.left_out:
            self._setting.counters.add("drift/left_out")
        self.history.add(entry)
        self._count(beginning)
        tokens = self._open(entry.number, beginning)
        tokens.asked, tokens.user = _asked(entry, place, ask), ask.user
        return self._alive(entry, tokens, ask)

    def _open(self, number: int, beginning: TurnPrompt) -> Turn:
        tokens = self._tree.open_turn(number, beginning.after, beginning.token_ids)
        tokens.num_begun = beginning.num_begun
        return tokens

    def _count(self, beginning: TurnPrompt) -> None:
        counters, reason = self._setting.counters, beginning.reason
        counters.add("turns/asked")
        if reason:
            counters.add("drift/forks")
            counters.add(f"drift/forks_{reason}")
        if reason and reason != Rewritten.SUB_AGENT and beginning.is_rendered:
            counters.add("tokens/rendered_again", len(beginning.token_ids) - beginning.num_begun)
        if beginning.is_extended:
            counters.add("drift/answer_extended")

    # sampling

    def _alive(self, entry: TurnEntry, tokens: Turn, ask: TurnRequest) -> LiveTurn:
        turn = LiveTurn(self._answers.id_of(entry.number), entry, tokens, ask, self._setting.codec)
        self._live[entry.number] = turn
        if (finish := self._budget.ending(turn)) is None:
            entry.answer, entry.num_told = b"", -1  # whoever read it meanwhile read a part of it
            task = asyncio.create_task(self._sample_or_fail(turn), name=f"{self._order.key} {turn.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer(turn, finish)
        return turn

    async def _sample(self, turn: LiveTurn) -> None:
        while (finish := self._budget.ending(turn)) is None:
            if not await self._budget.until_room(turn):
                continue
            try:
                await self._sample_chunk(turn)
            except ContextFull:  # of the engines, which is shorter than the job's
                self._budget.stopped, finish = StopReason.CONTEXT_OVERFLOW, "length"
                break
            turn.stored()
        self._answer(turn, finish)
        self._let_go(turn)

    async def _sample_chunk(self, turn: LiveTurn) -> None:
        most = self._order.chunk_tokens
        if turn.ask.stop or turn.ask.single_call:
            most = min(most, max(self._stop_chunk_tokens, len(turn.tokens.sampled)))
        most = min(most, self._budget.room(turn))
        with self._budget.reserved(most):
            sampled = await self._sampled(turn, most)
            async with self._writing:
                await self._record(turn, self._as_asked(turn, sampled))

    async def _sampled(self, turn: LiveTurn, most: int) -> Sampled:
        setting, tokens = self._setting, turn.tokens
        started = setting.clock()
        with self._meter.sampling():
            sampled = await setting.policy.sample(
                self._tree.prompt_of(tokens),
                max_new_tokens=most,
                temperature=self._order.temperature,
                stop_token_ids=setting.codec.stop_ids,
                prefer_engine=tokens.branch.last_engine,
                sampling_seed=sampling_seed(turn.ask, tokens),
            )
        self._meter.held(started, sampled.held_s)
        return sampled

    async def _record(self, turn: LiveTurn, sampled: Sampled) -> None:
        spent = self._meter.take() if sampled.ids else None  # else with the next tokens
        segments = self._tree.add(turn.tokens, sampled, spent)
        self._setting.counters.add("tokens/sampled", len(sampled.ids))
        part = self._part() if self._parts.has_new else None
        with self._meter.storing():
            await self._store(part, segments, self._note())

    def _as_asked(self, turn: LiveTurn, sampled: Sampled) -> Sampled:
        """Without what is sampled behind the turn's end, where the request says that a call or a text is one."""
        codec, tokens, found = self._setting.codec, turn.tokens, sampled.ids
        if turn.ask.single_call and (end := first_call_end(codec, tokens.said, found, turn.ask.tools)) is not None:
            self._end(turn)
            sampled = head(sampled, end)
            found = sampled.ids
        ended = stop_text_end(codec, [*tokens.sampled, *found], turn.ask.stop, len(tokens.sampled))
        if ended is None:
            return sampled
        self._end(turn, ended[1])
        return head(sampled, ended[0] - len(tokens.sampled))

    def _end(self, turn: LiveTurn, stop_text: str = "") -> None:
        """The tokens alone do not say that they are all, nor which request's stop text ended them."""
        turn.entry.finish, turn.entry.stop_text = "stop", stop_text
        self._parts.touch(turn.entry.number, is_due=True)

    def _answer(self, turn: LiveTurn, finish: str) -> None:
        turn.entry.finish = finish
        turn.settle(self._answers.read(turn.entry, turn.ask.tools))

    def _let_go(self, turn: LiveTurn) -> None:
        """What nobody waits for any more is not held: an episode has many turns."""
        if turn.is_over and self._live.get(turn.entry.number) is turn:
            self._parts.touch(turn.entry.number)
            del self._live[turn.entry.number]

    def _settle_all(self, refusal: Refusal) -> None:
        for turn in list(self._live.values()):
            turn.settle(refusal)
            self._let_go(turn)

    def _close(self, parent: TurnEntry) -> None:
        """A turn with a continuation is over, even if no client waited for its end."""
        self._parts.touch(parent.number)
        if not parent.finish:
            sampled = self._tree.turns[parent.number].sampled
            parent.finish = "stop" if sampled and sampled[-1] in self._setting.codec.stop_ids else "length"

    def _digest(self, entry: TurnEntry, tools: Sequence[ToolSchema]) -> bytes:
        turn = self._live.get(entry.number)
        is_sampled = turn is not None and turn.answer is None
        return b"" if is_sampled else self._answers.digest(entry, tools)

    # what is kept

    @property
    def num_calls(self) -> int:
        return sum(entry.num_calls for entry in self.history.entries.values())

    def _part(self) -> TreePart:
        """What has changed behind all segments that were cut so far. Nothing may be awaited between this and its
        storing."""
        given = self.history.entries, self._live, self.rewards.posted, self.stopped
        return self._parts.next(*given, finished=self._is_finished, num_refused=self.num_rewards_refused)

    async def _store(self, part: TreePart | None, segments: Sequence[Segment] = (), note: str = "") -> None:
        tree, kept = self._tree, None
        if part is not None and part.is_empty:
            part = None
            self._parts.settle(self.history.entries)
        if part is None and not segments:
            return
        if part is not None:
            kept = Kept(tree.key, Snapshot(tree.attempt, tree.num_segments, part.data), is_part=True)
        await self._setting.outbox.append(segments, note, kept=kept)
        if part is not None:
            self._parts.stored(part)
            self._parts.settle(self.history.entries)

    def _check_room(self, num_bytes: int) -> None:
        """For so many more. Raises ``Refusal``."""
        try:
            check_room(self._parts.num_bytes + num_bytes)
        except SnapshotTooLarge as error:
            raise Refusal(RefusalKind.OVER_BUDGET, f"rollout stopped: too many turns to keep: {error}") from error

    async def _save(self) -> None:
        """Raises ``Refusal``."""
        try:
            await self._store(self._part())
        except Exception as error:  # the lease is lost, or the server was rolled back
            self._fail(error)
            raise self._lost() from error

    async def _keep_delivery(self) -> None:
        if not self.is_sealed and not self.failure.done():
            await self._save()

    def _note(self) -> str:
        turns = len(self.history.entries)
        return self._meter.timings.note(
            turn=turns - 1, tool_calls=self.num_calls, tokens_sampled=self._tree.num_sampled
        )

    # the end

    async def seal(self) -> None:
        """No later request is answered. Returns once nothing is sampled any more and answers under way are settled."""
        self.is_sealed = True
        async with self._writing:  # so that no segment is on its way
            await self._cancel(Refusal(RefusalKind.ENDED, "this episode has ended"))
        try:
            async with asyncio.timeout(LAST_DELIVERY_S):
                for turn in list(self._live.values()):
                    while turn.deliveries and turn.answer is not None:
                        await turn.changed.wait()
        except TimeoutError:
            self._setting.counters.add("turns/delivery_unknown")

    async def abandon(self) -> None:
        """Nothing more is sampled here, and whoever waits is told to ask again. Harmless after ``seal``."""
        self._fail(Drained(str(self._order.key)))
        await self._cancel(self._lost())

    async def _cancel(self, refusal: Refusal) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._settle_all(refusal)

    async def _sample_or_fail(self, turn: LiveTurn) -> None:
        try:
            await self._sample(turn)
        except Exception as error:  # of one turn, but it ends the attempt: the record may have a hole
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_result(error)
        self._settle_all(self._lost())

    @property
    def is_erased(self) -> bool:
        """As far as is known here: it is told with the next write."""
        return self.failure.done() and isinstance(self.failure.result(), EpisodeErased)

    def _lost(self) -> Refusal:
        """Why nothing more is answered here after the failure."""
        if self.is_erased:
            return Refusal(RefusalKind.ENDED, ERASED)
        if self.failure.done() and isinstance(error := self.failure.result(), Refusal):
            return error  # whoever keeps its records knows
        return Refusal(RefusalKind.AWAY, "this episode is being moved; ask again")


def _asked(entry: TurnEntry, place: PrefixMatch, ask: TurnRequest) -> Asked:
    model = ask.model[:MAX_ASKED_CHARS]
    return Asked(entry.parent, entry.reason, ask.dialect, model, len(ask.messages), place.num_old)
