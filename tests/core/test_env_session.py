"""Sessions of plain classes: what the policy reads, what ends an episode, what is a failure; nothing blocks."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from gspo_core.env import (
    RESERVED_NAMES,
    CallStatus,
    Context,
    EnvironmentFailed,
    Observation,
    ParsedTurn,
    PlainEnvironment,
    Session,
    Start,
    Timeouts,
    ToolCall,
)
from gspo_core.env.session import as_reward
from gspo_core.types import Split, StopReason

# Long enough for a tool that does nothing on a busy machine, short enough to wait for.
SHORT = Timeouts(step_timeout_s=1.0)


class Counter:
    """Raise the counter to the target, then say done."""

    tasks = [{"target": target} for target in range(3, 12)]  # noqa: RUF012
    reward_range = (-1.0, 1.0)

    def reset(self, target: int) -> str:
        self.value, self.target, self.closed = 0, target, 0
        return f"Reach exactly {target}."

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: how much (1..5)
        """
        if not 1 <= amount <= 5:
            raise ValueError("amount must be 1..5")
        self.value += amount
        return str(self.value)

    def hang(self) -> str:
        """Never come back in time."""
        self.hanging.wait(20)
        return "late"

    async def oversleep(self) -> str:
        """Never come back in time, but let oneself be stopped."""
        await asyncio.sleep(20)
        return "late"

    def leave(self) -> str:
        """Try to end the process."""
        raise SystemExit(3)

    hanging = threading.Event()

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def close(self) -> None:
        self.closed += 1


def call(name: str | None, arguments: Any = None, status: CallStatus = CallStatus.OK) -> ToolCall:
    return ToolCall(name, {} if arguments is None else arguments, status, "", 0, 1)


def turn(*calls: ToolCall, text: str = "") -> ParsedTurn:
    return ParsedTurn(text, calls)


def contents(observation: Observation) -> list[Any]:
    return [message["content"] for message in observation.messages]


async def begin(cls: Any, task: Mapping[str, Any] | None = None, limits: Timeouts | None = None) -> Any:
    """A started session; as Any, so that tests may look at the instance inside."""
    session = PlainEnvironment(cls, {}, name=cls.__name__).session(limits=limits)
    await session.start(task or {}, 0)
    return session


def num_threads(cls: type) -> int:
    return sum(thread.name == f"env {cls.__name__}" for thread in threading.enumerate())


async def test_an_episode_from_start_to_reward() -> None:
    environment = PlainEnvironment(Counter, {}, name="counter")
    session: Session = environment.session()
    start = await session.start(await environment.task(Split.TRAIN, 0), seed=1)
    assert start == Start(
        [
            {"role": "system", "content": "Raise the counter to the target, then say done."},
            {"role": "user", "content": "Reach exactly 3."},
        ],
        environment.tools,
    )
    first = await session.act(turn(call("add", {"amount": 2}), call("add", {"amount": 1})))
    assert first == Observation(
        [
            {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call_0"},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_1"},
        ]
    )
    assert await session.act(turn(text="done")) == Observation(done=True, stop_reason=StopReason.COMPLETED)
    assert await session.score() == (1.0, {})
    await session.close()


@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        (call("add", {"amount": 9}), "error: ValueError: amount must be 1..5"),
        (call("add", {"amount": "2"}), "error: amount must be integer, not string"),
        (call("add", {}), "error: add needs the argument 'amount'"),
        (call("add", [2]), "error: arguments must be an object, not array"),
        (call("subtract"), "error: unknown tool 'subtract'; available: ['add', 'hang', 'leave', 'oversleep']"),
        (call("get_reward"), "error: unknown tool 'get_reward'; available: ['add', 'hang', 'leave', 'oversleep']"),
        (call("close"), "error: unknown tool 'close'; available: ['add', 'hang', 'leave', 'oversleep']"),
        (call(None, None, CallStatus.INVALID_JSON), "error: invalid_json"),
        (call(None, None, CallStatus.UNCLOSED_BLOCK), "error: unclosed_block"),
        (call("leave"), "error: RuntimeError: SystemExit 3"),
    ],
)
async def test_an_error_is_an_answer_and_the_episode_goes_on(attempt: ToolCall, answer: str) -> None:
    session = await begin(Counter, {"target": 3})
    observation = await session.act(turn(attempt, call("add", {"amount": 3})))
    assert contents(observation) == [answer, "3"]
    assert not observation.done
    assert await session.score() == (1.0, {})


async def test_a_cancellation_that_the_authors_code_makes_is_an_answer_too() -> None:
    class Impatient(Counter):
        async def give_up(self) -> str:
            """Start something and stop it."""
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
            return "never"

    session = await begin(Impatient, {"target": 3})
    observation = await session.act(turn(call("give_up"), call("add", {"amount": 3})))
    assert contents(observation) == ["error: RuntimeError: CancelledError", "3"]


async def test_arguments_as_a_string_are_decoded_once_more() -> None:
    session = await begin(Counter, {"target": 3})
    assert contents(await session.act(turn(call("add", '{"amount": 3}')))) == ["3"]
    refused = "error: arguments must be an object, not string"
    for number in ("NaN", "1e999"):
        assert contents(await session.act(turn(call("add", f'{{"amount": {number}}}')))) == [refused]


async def test_only_public_methods_that_are_not_reserved_are_tools() -> None:
    class World:
        def reset(self) -> None: ...
        def get_reward(self) -> float: ...  # type: ignore[empty-body]
        def act(self) -> None: ...
        @classmethod
        def shared(cls) -> str:
            return cls.__name__

        @staticmethod
        def static() -> None: ...
        @property
        def status(self) -> str:
            raise RuntimeError("a property is not read to find out whether it is a tool")

        def _hidden(self) -> None: ...
        def snapshot(self) -> None: ...
        def restore(self, state: Any) -> None: ...
        def on_message(self, text: str) -> None: ...

        stored = len

    environment = PlainEnvironment(World, {}, name="world")
    assert [tool["function"]["name"] for tool in environment.tools] == ["act", "shared"]
    assert {"reset", "get_reward", "done", "close", "limits", "tasks", "eval_tasks"} <= RESERVED_NAMES
    session = environment.session()
    await session.start({}, 0)
    assert contents(await session.act(turn(call("shared")))) == ["World"]


async def test_a_sync_tool_that_overruns_ends_the_episode_with_the_lowest_reward() -> None:
    Counter.hanging.clear()
    session = await begin(Counter, {"target": 3}, SHORT)
    observation = await session.act(turn(call("add", {"amount": 3}), call("hang"), call("add", {"amount": 1})))
    assert contents(observation) == ["3", "error: hang timed out after 1s"]
    assert observation.stop_reason is StopReason.TOOL_TIMEOUT
    assert await session.score() == (-1.0, {})
    await session.close()
    assert "timed out" in session.close_failure
    Counter.hanging.set()
    deadline = time.monotonic() + 20
    while not session._instance.closed:  # it is closed after all, when its thread comes back
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_async_tool_that_overruns_is_stopped_and_the_episode_goes_on() -> None:
    session = await begin(Counter, {"target": 3}, SHORT)
    observation = await session.act(turn(call("oversleep"), call("add", {"amount": 3})))
    assert contents(observation) == ["error: oversleep timed out after 1s", "3"]
    assert not observation.done
    assert await session.score() == (1.0, {})


async def test_an_async_tool_that_cannot_be_stopped_is_lost() -> None:
    class Stubborn(Counter):
        async def refuse(self) -> None:
            while not self.hanging.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

    Stubborn.hanging.clear()
    try:
        session = await begin(Stubborn, {"target": 3}, SHORT)
        observation = await session.act(turn(call("refuse")))
        assert observation.stop_reason is StopReason.TOOL_TIMEOUT
    finally:
        Stubborn.hanging.set()


async def test_a_sync_tool_never_runs_on_the_loop() -> None:
    """Ten sessions wait for each other inside their tools: only possible when none of them holds the loop."""
    barrier = threading.Barrier(10, timeout=20)

    class Meeting(Counter):
        def meet(self) -> str:
            barrier.wait()
            return "met"

    sessions = [await begin(Meeting, {"target": 3}) for _ in range(10)]
    observations = await asyncio.gather(*(session.act(turn(call("meet"))) for session in sessions))
    assert [contents(observation) for observation in observations] == [["met"]] * 10


async def test_sync_members_of_a_session_share_one_thread() -> None:
    class Database(Counter):
        def __init__(self) -> None:
            self.connection = sqlite3.connect(":memory:")

        def ask(self) -> str:
            return str(self.connection.execute("select 7").fetchone()[0])

        def close(self) -> None:
            self.connection.close()

    session = await begin(Database, {"target": 3})
    assert contents(await session.act(turn(call("ask")))) == ["7"]
    await session.close()
    assert session.close_failure is None


async def test_threads_end_with_their_sessions() -> None:
    class Passing(Counter): ...

    sessions = [await begin(Passing, {"target": 3}) for _ in range(5)]
    assert num_threads(Passing) == 5
    for session in sessions:
        await session.close()
    deadline = time.monotonic() + 20
    while num_threads(Passing):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_async_class_runs_on_the_loop() -> None:
    class Async:
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def reset(self) -> str:
            return "go"

        async def look(self) -> bool:
            return self.loop is asyncio.get_running_loop()

        async def get_reward(self) -> float:
            return 0.5

        async def close(self) -> None:
            self.closed = True

    session = await begin(Async)
    assert contents(await session.act(turn(call("look")))) == ["true"]
    assert await session.score() == (0.5, {})
    await session.close()
    assert session._instance.closed
    assert num_threads(Async) == 0


async def test_done_ends_the_episode_as_attribute_and_as_property() -> None:
    class Door(Counter):
        def open(self) -> str:
            self.done = True
            return "open"

    class Gate(Counter):
        @property
        def done(self) -> bool:
            return self.value >= self.target

    door, gate = await begin(Door, {"target": 3}), await begin(Gate, {"target": 3})
    assert not (await door.act(turn(call("add", {"amount": 1})))).done
    assert (await door.act(turn(call("open")))).stop_reason is StopReason.ENV_DONE
    assert not (await gate.act(turn(call("add", {"amount": 1})))).done
    assert (await gate.act(turn(call("add", {"amount": 2})))).stop_reason is StopReason.ENV_DONE


async def test_on_message_answers_free_text_until_it_returns_none() -> None:
    class Game(Counter):
        def on_message(self, text: str) -> str | None:
            if text == "bye":
                return None
            return f"{len(text)}, {int(text)}"

    session = await begin(Game, {"target": 3})
    assert await session.act(turn(text="12")) == Observation([{"role": "user", "content": "2, 12"}])
    # What the policy wrote made it fail, so it is told; ending here would be a way out without a reward.
    observation = await session.act(turn(text="x"))
    assert contents(observation) == ["error: ValueError: invalid literal for int() with base 10: 'x'"]
    assert await session.act(turn(text="bye")) == Observation(done=True, stop_reason=StopReason.COMPLETED)


async def test_reset_gets_what_its_signature_takes() -> None:
    class Named:
        def reset(self, target: int, seed: int) -> str:
            return f"{target} {seed}"

        def get_reward(self) -> float:
            return 0.0

    class Open(Named):
        def reset(self, **task: Any) -> str:  # type: ignore[override]
            return repr(task)

    session = PlainEnvironment(Named, {}, name="n").session()
    start = await session.start({"target": 3, "unused": 1, "prompt": "p "}, seed=7)
    assert start.messages[0]["content"] == "p 3 7"
    session = PlainEnvironment(Open, {}, name="o").session()
    assert (await session.start({"target": 3}, seed=7)).messages[0]["content"] == "{'target': 3}"


async def test_the_context_is_injected_and_hidden() -> None:
    logged: list[Any] = []

    class World:
        def reset(self, ctx: Context) -> str:
            ctx.on_log = lambda text, fields: logged.append((text, fields))
            return f"{ctx.episode_id} {ctx.seed} {ctx.task}"

        def look(self, where: str, ctx: Context) -> float:
            ctx.metric("looks", 1)
            ctx.log("looked", where=where)
            return ctx.deadline_s

        def get_reward(self, ctx: Context) -> float:
            return ctx.metrics["looks"]

    environment = PlainEnvironment(World, {}, name="world")
    assert list(environment.tools[0]["function"]["parameters"]["properties"]) == ["where"]
    session = environment.session(episode_id="job/1/2")
    start = await session.start({"a": 1}, seed=5)
    assert start.messages[0]["content"] == "job/1/2 5 {'a': 1}"
    assert contents(await session.act(turn(call("look", {"where": "x"})))) == ["20.0"]
    assert await session.score() == (1.0, {})
    assert dict(session.metrics) == {"looks": 1.0}
    assert logged == [("looked", {"where": "x"})]


def scoring(value: Any) -> type:
    class World:
        def reset(self) -> None: ...
        def get_reward(self) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

    return World


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, (1.0, {})),
        (2, (2.0, {})),
        ({"right": 1.0, "short": 0.25}, (1.25, {"right": 1.0, "short": 0.25})),
        ({"right": -1}, (-1.0, {"right": -1.0})),
    ],
)
async def test_rewards_are_numbers_or_named_parts(value: Any, reward: Any) -> None:
    assert await (await begin(scoring(value))).score() == reward


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, None, "1", [1.0], {}, {"a": None}, {"a": -math.inf}, KeyError("lost")]
)
async def test_a_reward_that_is_no_finite_number_is_a_failure_and_never_0(value: Any) -> None:
    session = await begin(scoring(value))
    with pytest.raises(EnvironmentFailed) as error:
        await session.score()
    assert error.value.phase == "score"


@pytest.mark.parametrize(
    ("task", "reset_timeout_s", "reason"),
    [
        ({"target": 3}, 60.0, "OSError: no disk"),
        ({}, 60.0, "missing 1 required positional argument: 'target'"),
        ({"target": -1}, 0.1, "timed out after 0.1s"),
    ],
)
async def test_failures_of_reset_are_not_the_policy_s(task: Any, reset_timeout_s: float, reason: str) -> None:
    go_on = threading.Event()

    class Broken(Counter):
        def reset(self, target: int) -> str:
            if target < 0:
                go_on.wait(20)
            raise OSError("no disk")

    session = PlainEnvironment(Broken, {}, name="broken").session(limits=Timeouts(reset_timeout_s=reset_timeout_s))
    with pytest.raises(EnvironmentFailed, match=reason) as error:
        await session.start(task, 0)
    assert error.value.phase == "reset"
    go_on.set()
    await session.close()


async def test_close_runs_once_on_every_path() -> None:
    closed: list[int] = []

    class Closing(Counter):
        def reset(self, target: int) -> str:
            if not target:
                raise ValueError("no target")
            return super().reset(target)

        def close(self) -> None:
            closed.append(1)
            raise RuntimeError("already gone")

    environment = PlainEnvironment(Closing, {}, name="closing")
    unused, failed, used = (environment.session() for _ in range(3))
    await unused.close()
    assert not closed  # there was nothing to close
    with pytest.raises(EnvironmentFailed):
        await failed.start({"target": 0}, 0)
    await failed.close()
    assert len(closed) == 1
    await used.start({"target": 3}, 0)
    await used.close()
    await used.close()
    assert len(closed) == 2
    assert used.close_failure == "error: RuntimeError: already gone"


async def test_close_follows_a_start_that_was_cancelled_half_way() -> None:
    entered, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Counter):
        def __init__(self) -> None:
            entered.set()
            go_on.wait(20)

        def close(self) -> None:
            closed.set()

    environment = PlainEnvironment(Slow, {}, name="slow")
    session = environment.session()
    starting = asyncio.create_task(session.start({"target": 3}, 0))
    while not entered.is_set():
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    await session.close()
    assert closed.is_set()


async def test_sessions_do_not_share_state() -> None:
    first, second = await begin(Counter, {"target": 3}), await begin(Counter, {"target": 4})
    await first.act(turn(call("add", {"amount": 3})))
    await second.act(turn(call("add", {"amount": 4})))
    assert (await first.score(), await second.score()) == ((1.0, {}), (1.0, {}))


async def test_misuse_of_a_session_is_refused() -> None:
    session = PlainEnvironment(Counter, {}, name="counter").session()
    with pytest.raises(RuntimeError, match="has not started"):
        await session.act(turn())
    await session.start({"target": 3}, 0)
    with pytest.raises(RuntimeError, match="only be started once"):
        await session.start({"target": 3}, 0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("", 1.0, "no name of a number"),
        ("x" * 129, 1.0, "no name of a number: 1 to 128 printable characters, not 129"),
        ("two\nlines", 1.0, "no name of a number"),
        ("profit", 1e16, "profit is 1e\\+16, beyond 1e\\+15"),
        ("one_more", 1.0, "one_more would be one more than 128"),
    ],
)
def test_a_number_beyond_the_bounds_is_refused_by_its_name(name: str, value: float, told: str) -> None:
    context = Context("job/0/0", 0, {})
    for number in range(128):
        context.metric(f"number/{number}", 1e15)
    context.metric("number/0", -1e15)  # one that is known
    with pytest.raises(ValueError, match=told):
        context.metric(name, value)
    assert len(context.metrics) == 128


def test_a_reward_that_no_sum_survives_is_a_failure_of_the_environment() -> None:
    with pytest.raises(EnvironmentFailed, match="profit is 1e\\+16, beyond 1e\\+15"):
        as_reward({"profit": 1e16})
    with pytest.raises(EnvironmentFailed, match="129 numbers of an episode"):
        as_reward({f"part{number}": 0.0 for number in range(129)})
