"""Turns for keys that just talk: conversations without an episode, recorded as traces and never trained.

Rule: what is answered is in the tree first, as in an episode: exact ids, log-probs, versions. Which conversation a
request continues is found by its messages; one that is known to none of them here begins a trace. A key is asked for
at every request, so one that was revoked or is used up is refused at the next. A turn is used up before it begins: a
request that is refused, whose client has left, or whose charge was never answered uses nothing up.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from gspo_core.chat import ChatCodec
from gspo_core.codec import decode
from gspo_core.environment_contract import Environment, Session
from gspo_core.environment_spec import EpisodeLimits
from gspo_core.types import EpisodeKey, Segment, Split
from services.episodes.matching import Beginnings
from services.episodes.metering import Meter, Timings
from services.episodes.outbox import Outbox
from services.episodes.tree import TokenTree
from services.gateway.agent.episode import STOP_CHUNK_TOKENS, AgentEpisode
from services.gateway.agent.live import Deciding, Delivery, in_turn
from services.gateway.agent.talk_jobs import TalkJob, TalkJobs
from services.gateway.agent.traffic import Redactor, redacted
from services.gateway.dialects.turns import Refusal, RefusalKind, TurnRequest
from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.queue import Append, Kept, LeasedEpisode, Snapshot
from services.state.refusals import Fenced, Full, Refused
from services.state.talks import Presented, TalkKeyRecord, Talks, TrafficRetention
from services.workers.setting import EpisodeSetting, EpisodeSpec, Playing, ResumeState, StartOver

# Beyond these the idle one that was silent longest is let go; if it goes on, that is another trace. Where none is idle
# there may be some more, as each key has its share: six times as many with as many keys.
MAX_CONVERSATIONS = 256
MAX_TURNS = 1000
LEAVE_EVERY_S = 60.0
FOREVER = 10**9


class TraceRecords:
    """The records of one conversation, as an episode's are kept."""

    def __init__(
        self, talks: Talks, key: str, user: str, keep: TrafficRetention, codec: ChatCodec, redact: Redactor | None
    ) -> None:
        self._talks, self._key, self._user, self._keep = talks, key, user, keep
        self._codec, self._redact = codec, redact

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        """What else is kept lives as long as this process."""
        given = [one for one in appends if isinstance(one, Append)]
        if not given:
            return
        segments = [decode(one.payload) for one in given]
        tokens = sum(segment.num_actions for segment in segments)
        engine_s = sum(segment.spent.engine_s for segment in segments if segment.spent is not None)
        payloads, trace = [one.payload for one in given], given[0].key.group
        if self._redact is not None:
            payloads = await redacted(segments, self._codec, self._redact)
        index = given[0].index
        try:
            await self._talks.record(
                job, self._key, trace, self._user, payloads, tokens=tokens, s=engine_s, keep=self._keep, index=index
            )
        except Fenced as error:  # revoked while it was sampled: not to be asked for again
            raise unknown_key() from error

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        raise RuntimeError("a conversation is kept with its turns")

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        return None

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        return []

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None:
        raise RuntimeError("a conversation does not begin again")

    async def await_reward(self, token: str, end: Append, kept: bytes, deadline: float) -> None:
        raise RuntimeError("a conversation has no reward")


class _Nobody:
    """Drives a conversation: whoever asks does."""

    def begin(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: Session,
        past: ResumeState,
        timings: Timings,
    ) -> Playing:
        raise RuntimeError("a conversation has no attempts")

    async def resume(
        self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int, record: Sequence[Segment]
    ) -> StartOver:
        raise RuntimeError("a conversation has no attempts")

    async def has_kept(self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> bool:
        raise RuntimeError("a conversation has no attempts")


class TalkCharges:
    """Turns of keys: used up before they begin, and given back where they do not. It decides upon no request."""

    def __init__(self, talks: Talks) -> None:
        self._talks = talks
        self._giving_back: set[asyncio.Task[None]] = set()

    async def look_up(self, key: str) -> tuple[Presented, TalkKeyRecord]:
        """Raises ``Refusal``."""
        with _as_refusals():
            if (presented := Presented.read(key)) is None:
                raise Fenced("no talk key")
            return presented, await self._talks.use(presented)

    @contextlib.asynccontextmanager
    async def charged(self, presented: Presented) -> AsyncIterator[None]:
        """With a turn of the key, which is given back where what is done inside fails. Raises ``Refusal``."""
        token = secrets.token_hex(8)
        with _as_refusals():
            try:
                await self._talks.use(presented, num_turns=1, token=token)
                yield
            except (Fenced, Full):  # nothing was used up
                raise
            except (Exception, asyncio.CancelledError) as error:  # also where only the reply was lost
                giving_back = self._begin_to_give_back(presented, token)
                if isinstance(error, Refusal):  # its client may ask for another turn at once
                    await asyncio.shield(giving_back)
                raise

    async def close(self) -> None:
        await asyncio.gather(*self._giving_back)

    def _begin_to_give_back(self, presented: Presented, token: str) -> asyncio.Task[None]:
        """It goes on where whoever asked is gone."""
        task = asyncio.create_task(self._give_back(presented, token))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
        return task

    async def _give_back(self, presented: Presented, token: str) -> None:
        try:
            await self._talks.give_back(presented, 1, token)
        except (Away, RedisFault, Refused) as error:  # the client is to hear why it was refused
            get_logger().warning("a turn is not given back", key=presented.id, job=presented.job, error=str(error))


@dataclass(frozen=True, slots=True)
class _Conversation:
    key: str
    user: str
    job: TalkJob
    episode: AgentEpisode

    @property
    def trace(self) -> int:
        return self.episode.key.group


class Talking:
    """The ``Turns`` of keys that begin with ``tk_``."""

    def __init__(
        self,
        talks: Talks,
        jobs: TalkJobs,
        keep: TrafficRetention,
        now: Callable[[], float],
        model_names: Sequence[str] = ("policy",),
        redact: Redactor | None = None,
    ) -> None:
        """``now``: Unix seconds. ``redact``: through which all text goes before it is stored."""
        self._talks = talks
        self._charges = TalkCharges(talks)
        self._jobs = jobs
        self._keep = keep
        self._now = now
        self._model_names = tuple(model_names)
        self._redact = redact
        self._conversations: OrderedDict[int, _Conversation] = OrderedDict()
        """By trace; the one that was silent longest first."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Ends of conversations that are not found any more."""
        self._repeated: set[str] = set()
        self._deciding: Deciding = {}
        """Requests without a turn yet, by their key and what is equal in those that repeat them."""

    async def ask(self, key: str, ask: TurnRequest) -> Delivery:
        if ask.unsupported:
            raise ask.unsupported[0]  # no job says otherwise
        given = Presented.read(key)
        name = "" if given is None else f"{given.id} {ask.repeat_key or ask.digest}"
        async with in_turn(self._deciding, name):  # until it has its turn: only then is a retry known to be one
            with self._repeating(given, ask) as asked_before:
                presented = await self._known(key, has_turn=asked_before is not None)
                job = await self._jobs.get(presented.job)
                conversation = asked_before or self._continued(presented.id, ask)
                conversation = conversation or self._another(presented, job, ask.user)
                charged = contextlib.nullcontext() if asked_before else self._charges.charged(presented)
                delivery = await conversation.episode.ask(ask, charged)
                self._hold(conversation)
        delivery.trace = str(conversation.trace)
        return delivery

    async def count_tokens(self, key: str, ask: TurnRequest) -> int:
        presented = await self._known(key, has_turn=False)
        job = await self._jobs.get(presented.job)
        conversation = self._continued(presented.id, ask) or self._conversation(presented, job, "")
        return await conversation.episode.count_tokens(ask)

    async def model_names(self, key: str) -> tuple[str, ...]:
        await self._known(key)
        return self._model_names

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        self._no_episode()

    async def finish(self, key: str) -> None:
        self._no_episode()

    async def close(self) -> None:
        """Whoever waits is told to ask again."""
        for trace in list(self._conversations):
            self._let_go(trace)
        await asyncio.gather(*self._leaving)
        await self._charges.close()
        await self._jobs.close()

    async def leave_ended(self) -> None:
        """Jobs that are over, with their conversations. Raises ``Away`` and ``RedisFault``."""
        await self._jobs.leave_ended()
        for trace, conversation in list(self._conversations.items()):
            if conversation.job.leaving.is_set():
                self._let_go(trace)

    async def leave_ended_for_ever(self, every_s: float = LEAVE_EVERY_S) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.leave_ended()
            except (Away, RedisFault) as error:
                get_logger().warning("jobs that are over are left later", error=str(error))

    async def _known(self, key: str, *, has_turn: bool = True) -> Presented:
        presented, found = await self._charges.look_up(key)
        if found.expires_at is not None and found.expires_at < self._now():
            raise Refusal(RefusalKind.UNKNOWN_KEY, "this key has expired")
        if found.used_up and not has_turn:  # nothing is read for it in vain
            raise used_up(found.used_up)
        return presented

    @contextlib.contextmanager
    def _repeating(self, presented: Presented | None, ask: TurnRequest) -> Iterator[_Conversation | None]:
        """The conversation with a turn for it that was used up before. Of equal requests at once one gets that: a turn
        that was lost is given again to one of them, and the others begin turns."""
        name = "" if presented is None else f"{presented.id} {ask.digest}"
        found = None
        if presented is not None and name not in self._repeated:
            found = next((one for one in self._theirs(presented.id, ask) if one.episode.gives_again(ask)), None)
        if found is not None:
            self._repeated.add(name)
            self._conversations.move_to_end(found.trace)
        try:
            yield found
        finally:
            if found is not None:
                self._repeated.discard(name)

    def _continued(self, key: str, ask: TurnRequest) -> _Conversation | None:
        """All its messages are looked at, in each conversation."""
        beginnings = _beginnings(ask)
        return next((one for one in self._theirs(key, ask) if one.episode.knows(ask, beginnings)), None)

    def _theirs(self, key: str, ask: TurnRequest) -> Iterator[_Conversation]:
        """The key's conversations, of the same user where the request names one: erasing one user's traffic must spare
        what another said in the same words."""
        for one in reversed(self._conversations.values()):
            is_theirs = one.key == key and ask.user in ("", one.user) and not one.job.leaving.is_set()
            if is_theirs and len(one.episode.history.entries) < MAX_TURNS:
                yield one

    def _another(self, presented: Presented, job: TalkJob, user: str) -> _Conversation:
        """Kept once something is answered in it. Raises ``Refusal``."""
        if len(self._conversations) >= MAX_CONVERSATIONS and self._idle() is None and self._has_share(presented.id):
            raise Refusal(RefusalKind.AWAY, "too many conversations are being answered at this gateway; ask again")
        return self._conversation(presented, job, user)

    def _has_share(self, key: str) -> bool:
        """Whether the key holds its share of all conversations. One that has less may begin another, so that no key
        waits for the others."""
        held = Counter(one.key for one in self._conversations.values())
        return held[key] >= MAX_CONVERSATIONS // len(held.keys() | {key})

    def _hold(self, conversation: _Conversation) -> None:
        """It was silent for the shortest time; those that are idle make room for it."""
        trace = conversation.trace
        if trace not in self._conversations:
            # Its record may have a hole then: what goes on from it begins another.
            conversation.episode.failure.add_done_callback(lambda _: self._let_go(trace))
        self._conversations[trace] = conversation
        self._conversations.move_to_end(trace)
        # Long requests that were read at the same time may have found the same room.
        while len(self._conversations) > MAX_CONVERSATIONS and (idle := self._idle()) is not None:
            self._let_go(idle)

    def _idle(self) -> int | None:
        return next((trace for trace, one in self._conversations.items() if one.episode.is_idle), None)

    def _let_go(self, trace: int) -> None:
        """It is not found any more, and what it samples ends soon."""
        if (found := self._conversations.pop(trace, None)) is not None:
            leaving = asyncio.get_running_loop().create_task(found.episode.abandon())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _conversation(self, presented: Presented, job: TalkJob, user: str) -> _Conversation:
        jobs, records = self._jobs, self._records(presented.id, user, job.codec)
        setting = EpisodeSetting(
            driver=_Nobody(),
            codec=job.codec,
            policy=job.policy,
            outbox=Outbox(records, job.id, "", jobs.retrier),
            records=records,
            token="",
            retrier=jobs.retrier,
            counters=jobs.counters,
            clock=jobs.clock,
            leaving=job.leaving,
        )
        order = _order(job, EpisodeKey(job.id, secrets.randbits(48), 0))
        if self._redact is not None:  # it sees whole turns, so they are sampled whole
            order = replace(order, chunk_tokens=order.max_turn_tokens)
        tree = TokenTree(order.key, 0, order.temperature)
        meter = Meter(Timings(), jobs.counters, jobs.clock)
        most = STOP_CHUNK_TOKENS if self._redact is None else order.max_turn_tokens
        episode = AgentEpisode(setting, order, tree, meter, self._now, most)
        return _Conversation(presented.id, user, job, episode)

    def _records(self, key: str, user: str, codec: ChatCodec) -> TraceRecords:
        return TraceRecords(self._talks, key, user, self._keep, codec, self._redact)

    def _no_episode(self) -> NoReturn:
        raise Refusal(RefusalKind.INVALID, "this key just talks: it has no episode to be rewarded or finished")


def _beginnings(ask: TurnRequest) -> Beginnings | None:
    """None where its messages cannot be read: whoever places them says why."""
    try:
        return Beginnings(ask.messages, ask.tools, ask.said)
    except (ValueError, TypeError, KeyError):
        return None


def _order(job: TalkJob, key: EpisodeKey) -> EpisodeSpec:
    spec, context = job.spec, job.context_tokens
    lease = LeasedEpisode(key, 0, 0, Split.TRAIN, task_index=0, environment=0, group_size=1)
    return EpisodeSpec(
        lease=lease,
        environment=cast(Environment, None),  # there is none, and nobody asks for it
        limits=EpisodeLimits(
            max_turns=FOREVER, max_tool_calls=FOREVER, max_episode_tokens=FOREVER, episode_timeout_s=FOREVER
        ),
        seed=0,
        temperature=spec.sampling.temperature,
        broken_reward=0.0,
        max_turn_tokens=spec.sampling.max_new_tokens,
        max_context_tokens=context,
        chunk_tokens=spec.rollout.chunk_tokens,
        model_context_tokens=context,
    )


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    """What Redis says of a key, as its client is told."""
    try:
        yield
    except Fenced:
        raise unknown_key() from None
    except Full as full:
        raise used_up(full.detail) from None
    except Away:
        raise Refusal(RefusalKind.AWAY, "keys cannot be looked up at the moment; ask again") from None


def unknown_key() -> Refusal:
    return Refusal(RefusalKind.UNKNOWN_KEY, "this key is not known, or was revoked")


def used_up(what: str) -> Refusal:
    """``what``: as ``Full`` names it."""
    return Refusal(RefusalKind.OVER_BUDGET, f"this key has used up its {'seconds' if what == 'ms' else what}")
