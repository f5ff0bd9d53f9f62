"""The faults themselves: one method a kind, each told what it hit.

The rule kept here: a fault hits processes and lines of this run only, and what was stopped goes on again. Recovery is
counted from the moment of the fault, for a stop from its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.state.client import Away, RedisFault
from services.state.jobs import JobStatus
from services.state.keys import job_key
from services.state.store import JobNotFound, Store
from tests.chaos.damage import damage_newest, damage_record, newest_checkpoint
from tests.chaos.disk import Disk
from tests.chaos.lies import ANSWER_MARK, LIES, SEGMENT_MARK, bit_turned
from tests.chaos.lines import Line, Order
from tests.chaos.players import IN_HOSTS
from tests.chaos.processes import Process
from tests.chaos.schedule import OF_AGENTS
from tests.chaos.solitude import kept_away
from tests.chaos.stack import LEASE_S, Stack
from tests.chaos.streams import IN_A_STREAM, Stream, Wait
from tests.chaos.watch import Watch, impatient

# Of the trainers that are killed: so many only lose the process of their attempt.
ATTEMPT_SHARE = 0.3
# The calls of a weight switch, as an engine hears them.
SWITCH_CALLS = {
    "pause": b"POST /pause_generation",
    "load": b"POST /update_weights_from_disk",
    "join": b"POST /init_weights_update_group",
    "begin": b"POST /begin_weight_update",
    "send": b"POST /update_weights_from_distributed",
    "end": b"POST /end_weight_update",
    "resume": b"POST /continue_generation",
}
KILLED_WITHIN_S = 0.03
"""Of hearing the call: before it is answered, or after."""
KILLED_IN_STREAM_S = 0.15
"""After it began; where it is over by then another is waited for."""
LEAVING_S = 60.0


@dataclass
class Hit:
    """What a fault did. ``jobs`` are those whose next step says that it is over."""

    target: str
    jobs: list[str]
    detail: str = ""
    after: Awaitable[None] | None = None
    """What is left to do, beside the next faults."""
    is_ordered: bool = False
    """It happens later, when something passes a line, and is told then."""


Miss = str
Outcome = Hit | Miss
Strike = Callable[[random.Random], Awaitable[Outcome]]


class Faults:
    """``happened`` is told of what was ordered, when it happens, with what the oracle has to know of it."""

    def __init__(self, stack: Stack, watch: Watch, disk: Disk, happened: Callable[..., None]) -> None:
        self._stack, self._watch, self._disk, self._happened = stack, watch, disk, happened
        self._disk_is_full = self._clock_is_off = False
        self.are_orders_single = False
        """What a line was told and has not met yet, it is not told again."""
        self.kinds: dict[str, Strike] = {
            "kill worker": lambda rng: self._kill("rollout", rng),
            "kill trainer": self._kill_trainer,
            "lose all trainers": self._lose_all_trainers,
            "kill engine": lambda rng: self._kill("engine", rng),
            "kill api": lambda rng: self._kill("api", rng),
            "kill redis": self._kill_redis,
            "kill gateway": partial(self._strike_agents, partial(self._kill, "gateway")),
            **{f"kill {victim} in a stream": self._in_stream(victim) for victim in ("gateway", "engine", "hosts")},
            "kill hosts of agents": partial(self._strike_agents, self._kill_hosts_of_agents),
            "stop gateway": partial(self._strike_agents, partial(self._stop, "gateway")),
            "cut agents": partial(self._strike_agents, self._cut_agents),
            "lose agent's answer": partial(self._strike_agents, self._lose_answer),
            "stop worker": lambda rng: self._stop("rollout", rng),
            "stop trainer": self._stop_trainer,
            "stop engine": lambda rng: self._stop("engine", rng),
            "stop redis": self._stop_redis,
            "flushall": self._flushall,
            "cut redis": self._cut_redis,
            "cut engine": self._cut_engine,
            **{name: partial(self._lose, name) for name in ("lose request", "lose reply", "halve reply")},
            **{f"kill engine at {call}": partial(self._kill_in_switch, call) for call in SWITCH_CALLS},
            **{f"lie: {lie}": partial(self._lie, lie) for lie in LIES},
            "turn bit": self._turn_bit,
            "spoil episode": partial(self._spoil, "episodes"),
            "spoil group": partial(self._spoil, "groups"),
            "ask to leave": self._ask_to_leave,
            "lose engine reply": self._lose_engine_reply,
            "stall redis": self._stall,
            "disk full": self._fill_disk,
            "torn checkpoint": self._tear,
            "clock jump": self._jump,
        }

    def impossible(self) -> list[str]:
        """Kinds that this machine does not allow."""
        missing = [] if self._disk.is_mounted else ["disk full"]
        missing += [] if self._stack.clock.can_jump else ["clock jump"]
        return missing + ([] if self._stack.size.has_agents else sorted(OF_AGENTS))

    def _running(self) -> list[str]:
        return [job.id for job in self._watch.running() if job.step or job.status]

    def _choose(self, service: str, rng: random.Random) -> Process | None:
        found = [one for one in self._stack.of(service) if not one.is_stopped]
        return rng.choice(found) if found else None

    async def _owner(self, rng: random.Random) -> tuple[str, Process] | None:
        """A running job and the trainer that has it."""
        owners = []
        with contextlib.suppress(Away, RedisFault):
            async with impatient(self._stack.redis_url) as client:
                for job in self._running():
                    name = await client.hget(job_key(job, "trainer"), "trainer")
                    pid = int(name.rpartition(b"-")[2]) if isinstance(name, bytes) else 0
                    owners += [(job, one) for one in self._stack.of("trainer") if one.pid == pid and not one.is_stopped]
        return rng.choice(owners) if owners else None

    # Death

    async def _kill(self, service: str, rng: random.Random) -> Outcome:
        process = self._choose(service, rng)
        if process is None:
            return "nobody is there"
        self._stack.nursery.kill(process)
        return Hit(process.name, [] if service == "api" else self._running())

    # Agents

    async def _strike_agents(self, strike: Strike, rng: random.Random) -> Outcome:
        """Whoever is struck, it is the jobs of agents that have to go on."""
        mine = [job for job in self._running() if self._watch.jobs[job].is_of_agents]
        outcome = await strike(rng) if mine else "no agent plays"
        if isinstance(outcome, Hit):
            outcome.jobs = mine
        return outcome

    def _in_stream(self, victim: str) -> Strike:
        return partial(self._strike_agents, partial(self._kill_in_stream, victim))

    async def _kill_in_stream(self, victim: str, rng: random.Random) -> Outcome:
        kind, streams = f"kill {victim} {IN_A_STREAM}", self._stack.streams
        if self.are_orders_single and streams.is_awaited(kind):
            return "it is ordered already"
        kill = {"gateway": self._kill_under, "engine": self._kill_engine_under, "hosts": self._kill_hosts_under}[victim]

        def strike(met: list[Stream], number: int) -> bool:
            told = kill(met)
            if told is not None:
                self._happened(kind, strike=number, open=[one.told() for one in met], **told)
            return told is not None

        streams.wait(Wait(kind, rng.uniform(0.0, KILLED_IN_STREAM_S), strike))
        return Hit(victim, self._running(), is_ordered=True)

    def _kill_under(self, met: list[Stream]) -> dict[str, Any] | None:
        gateways = [one for one in self._stack.of("gateway") if one.is_up]
        for gateway in gateways:
            self._stack.nursery.kill(gateway)
        for stream in met if gateways else ():
            stream.is_doomed = True
        return {} if gateways else None

    def _kill_engine_under(self, met: list[Stream]) -> dict[str, Any] | None:
        """One that samples for some of them."""
        streaming = {stream.run for stream in met}
        for name, sampling in self._stack.sampling.items():
            engine, served = self._stack.nursery.processes[name], streaming.intersection(sampling.runs)
            if served and engine.is_up:
                self._stack.nursery.kill(engine)
                return {"engine": name, "sampled": sorted(served)}
        return None

    def _kill_hosts_under(self, met: list[Stream]) -> dict[str, Any] | None:
        """Of agents that are functions, if one of them hears a stream."""
        heard = [stream for stream in met if stream.task in IN_HOSTS]
        gateway = next((one for one in self._stack.of("gateway") if one.is_up), None)
        if not heard or gateway is None or not self._stack.nursery.kill_children(gateway):
            return None
        for stream in heard:
            stream.is_doomed = True
        return {"died": sorted(stream.run for stream in heard)}

    async def _kill_hosts_of_agents(self, rng: random.Random) -> Outcome:
        gateway = self._choose("gateway", rng)
        if gateway is None or not self._stack.nursery.kill_children(gateway):
            return "nobody is there"
        return Hit(gateway.name, [])

    async def _cut_agents(self, rng: random.Random) -> Outcome:
        assert self._stack.agent_line is not None
        return Hit("agents", [], f"{self._stack.agent_line.cut()} connections")

    async def _lose_answer(self, rng: random.Random) -> Outcome:
        fault = rng.choice(["lose request", "lose reply", "halve reply"])
        return self._order_answer("lose agent's answer", fault=fault)

    def _order_answer(self, kind: str, **what: Any) -> Outcome:
        assert self._stack.agent_line is not None
        return self._order("agents", self._stack.agent_line, kind, **what)

    async def _kill_trainer(self, rng: random.Random) -> Outcome:
        owner = await self._owner(rng)
        if owner is None:
            return await self._kill("trainer", rng)
        job, trainer = owner
        if rng.random() < ATTEMPT_SHARE and self._stack.nursery.kill_children(trainer):
            return Hit(trainer.name, [job], "the process of its attempt alone")
        self._stack.nursery.kill(trainer)
        return Hit(trainer.name, [job])

    async def _lose_all_trainers(self, rng: random.Random) -> Outcome:
        trainers, jobs = self._stack.of("trainer"), self._running()
        if not trainers or not jobs:
            return "nobody trains"
        tell = partial(self._happened, "lose all trainers")
        away = kept_away(self._stack.nursery, trainers, jobs, self._stack.redis_url, tell)
        return Hit("all trainers", jobs, after=away, is_ordered=True)

    async def _kill_redis(self, rng: random.Random) -> Outcome:
        await self._stack.kill_redis()
        return Hit("redis", self._running())

    # Sleep

    async def _stop(self, service: str, rng: random.Random) -> Outcome:
        process = self._choose(service, rng)
        if process is None:
            return "nobody is there"
        return self._put_to_sleep(process, self._running(), rng)

    async def _stop_trainer(self, rng: random.Random) -> Outcome:
        owner = await self._owner(rng)
        if owner is None:
            return "nobody trains"
        return self._put_to_sleep(owner[1], [owner[0]], rng)

    def _put_to_sleep(self, process: Process, jobs: list[str], rng: random.Random) -> Hit:
        """For longer than a lease; who wakes up is a zombie."""
        seconds, pid = LEASE_S * rng.uniform(1.5, 3.0), process.pid
        self._stack.nursery.stop(process)

        async def wake() -> None:
            await asyncio.sleep(seconds)
            self._stack.nursery.go_on(process, pid)

        return Hit(process.name, jobs, f"{seconds:.1f} s", wake())

    async def _stop_redis(self, rng: random.Random) -> Outcome:
        seconds = rng.uniform(0.5, 2 * LEASE_S)
        return Hit("redis", self._running(), f"{seconds:.1f} s", self._stack.stop_redis(seconds))

    # Loss

    async def _flushall(self, rng: random.Random) -> Outcome:
        try:
            async with impatient(self._stack.redis_url) as client:
                await client.flushall()
        except (Away, RedisFault):
            return "Redis does not answer"
        return Hit("redis", self._running())

    async def _cut_redis(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.lines))
        num = self._stack.lines[name].cut()
        return Hit(name, self._running(), f"{num} connections")

    async def _cut_engine(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.engine_lines))
        num = self._stack.engine_lines[name].cut()
        return Hit(name, self._running(), f"{num} connections")

    async def _lose(self, what: str, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.lines))
        return self._order(name, self._stack.lines[name], what, fault=what)

    async def _lose_engine_reply(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.engine_lines))
        fault = rng.choice(["lose request", "lose reply", "halve reply"])
        return self._order(name, self._stack.engine_lines[name], "lose engine reply", fault=fault)

    def _order(self, name: str, line: Line, kind: str, *, mark: bytes = b"", **what: Any) -> Outcome:
        if self.are_orders_single and line.is_ordered(kind):
            return "it is ordered already"
        what = {"done": lambda: self._happened(kind)} | what
        line.order(Order(mark or line.mark, kind=kind, **what))
        return Hit(name, self._running(), is_ordered=True)

    # In the middle of a call

    async def _kill_in_switch(self, call: str, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.engine_lines))
        process, seconds = self._stack.nursery.processes[name], rng.uniform(0.0, KILLED_WITHIN_S)

        def kill() -> None:
            self._happened(f"kill engine at {call}")
            asyncio.get_running_loop().call_later(seconds, self._stack.nursery.kill, process)

        line = self._stack.engine_lines[name]
        return self._order(name, line, f"kill engine at {call}", mark=SWITCH_CALLS[call], done=kill)

    # Lies

    async def _lie(self, lie: str, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(self._stack.engine_lines))
        line = self._stack.engine_lines[name]
        return self._order(name, line, f"lie: {lie}", mark=ANSWER_MARK, reply=LIES[lie])

    async def _turn_bit(self, rng: random.Random) -> Outcome:
        name = rng.choice(sorted(name for name in self._stack.lines if name.startswith("worker")))

        def tell(job: str, group: int) -> None:
            self._happened("turn bit", job=job, group=group)

        change, line = bit_turned(rng.random(), tell), self._stack.lines[name]
        return self._order(name, line, "turn bit", mark=SEGMENT_MARK, request=change, done=lambda: None)

    async def _spoil(self, table: str, rng: random.Random) -> Outcome:
        """A record of the queue becomes garbage."""
        jobs = self._running()
        try:
            async with impatient(self._stack.redis_url) as client:
                for job in rng.sample(jobs, len(jobs)):
                    tell = partial(self._spoiling, f"spoil {table.removesuffix('s')}", job)
                    if await damage_record(client, job, table, rng, tell) is not None:
                        return Hit("redis", [job], table)
        except (Away, RedisFault):
            return "Redis does not answer"
        return "no queue holds anything"

    def _spoiling(self, kind: str, job: str, group: int) -> None:
        self._happened(kind, is_certain=False, job=job, group=group)

    # Departure

    async def _ask_to_leave(self, rng: random.Random) -> Outcome:
        """As an upgrade does: one process of the stack ends in order and its successor goes on."""
        process = self._choose(
            rng.choice(["rollout", "trainer", "api", *(["gateway"] if self._stack.size.has_agents else [])]), rng
        )
        if process is None:
            return "nobody is there"
        return Hit(process.name, self._running(), after=self._restart(process))

    async def _restart(self, process: Process) -> None:
        with contextlib.suppress(TimeoutError):  # somebody stopped it meanwhile: it is killed in the end
            await self._stack.nursery.restart(process, LEAVING_S)

    async def _stall(self, rng: random.Random) -> Outcome:
        name, seconds = rng.choice(sorted(self._stack.lines)), rng.uniform(0.3, 2 * LEASE_S)
        return Hit(name, self._running(), f"{seconds:.1f} s", self._stack.stall_redis(name, seconds))

    # Disks and clocks

    async def _fill_disk(self, rng: random.Random) -> Outcome:
        if self._disk_is_full:
            return "it is full already"
        if not self._disk.fill():
            return "it could not be filled"
        self._disk_is_full = True

        async def make_room() -> None:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            self._disk.empty()
            self._disk_is_full = False

        return Hit("disk", self._running(), after=make_room())

    async def _tear(self, rng: random.Random) -> Outcome:
        """The trainer is stopped first: what is damaged is the newest checkpoint of a job that is not over."""
        owner = await self._owner(rng)
        if owner is None:
            return "nobody trains"
        job, trainer = owner
        directory = self._watch.jobs[job].directory
        if newest_checkpoint(directory) is None:
            return "there is no checkpoint yet"
        self._stack.nursery.stop(trainer)
        damaged = None
        if await self._is_open(job):
            damaged = await asyncio.to_thread(damage_newest, directory, rng)
        self._stack.nursery.kill(trainer)
        return Hit(trainer.name, [job], damaged or "its job was over")

    async def _is_open(self, job: str) -> bool:
        with contextlib.suppress(Away, RedisFault, JobNotFound):
            async with impatient(self._stack.redis_url) as client:
                return not JobStatus((await Store(client).jobs.get(job)).status).is_terminal
        return False

    async def _jump(self, rng: random.Random) -> Outcome:
        if self._clock_is_off:
            return "it is off already"
        seconds = rng.choice([-3600, 3600])
        self._clock_is_off = True
        self._stack.clock.set(seconds)

        async def set_right() -> None:
            await asyncio.sleep(rng.uniform(2.0, 5.0))
            self._stack.clock.set(0)
            self._clock_is_off = False

        return Hit("redis", self._running(), f"{seconds:+d} s", set_right())


def described(outcome: Hit) -> dict[str, Any]:
    return {"target": outcome.target, "detail": outcome.detail, "jobs": outcome.jobs}
