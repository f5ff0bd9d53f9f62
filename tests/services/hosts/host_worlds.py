"""Worlds that misbehave, for tests of the host: loaded by path, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import Any


def die(how: str) -> str:
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(10)
    return "still here"


def daemonise() -> str:
    """Leaves a process behind that belongs to no group of ours; answers with its id."""
    program = "import os, time; os.setsid(); print(os.getpid(), flush=True); os.close(1); os.close(2); time.sleep(300)"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}])"
    return subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True).stdout.strip()


def pay(folder: str, seconds: float) -> str:
    """Written down outside of the world, so that what is done twice stays visible."""
    with open(os.path.join(folder, "payments"), "a") as file:
        file.write("paid\n")
    time.sleep(seconds)
    return "paid"


class Light:
    """Async: many sessions share a process."""

    tasks = [{"start": number} for number in range(10)]  # noqa: RUF012
    eval_tasks = [{"start": 0}]  # noqa: RUF012
    replayable = True
    reward_range = (-1.0, 10.0)

    async def reset(self, start: int) -> str:
        self.total = start
        return f"You have {start}."

    async def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.total += amount
        return str(self.total)

    async def rest(self, seconds: float) -> str:
        """Wait politely.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return "rested"

    async def block(self, seconds: float) -> str:
        """Wait rudely, in a task of its own.

        Args:
            seconds: how long
        """

        async def sleep() -> None:
            time.sleep(seconds)  # noqa: ASYNC251

        await asyncio.create_task(sleep())
        return "blocked"

    async def die(self, how: str) -> str:
        """Kill the process.

        Args:
            how: exit or a signal
        """
        return die(how)

    async def where(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    async def hold(self, megabytes: int) -> str:
        """Take memory and keep it.

        Args:
            megabytes: how much
        """
        self.held = bytearray(b"x") * (megabytes << 20)
        return str(megabytes)

    async def get_reward(self) -> float:
        return float(self.total)


class Slow(Light):
    """Async, and slow to judge: the coroutine is cancelled in time and nothing runs on."""

    replayable = False

    async def get_reward(self) -> float:
        await asyncio.sleep(60)
        return 0.0


class Far:
    """Behind a connection: what runs on there does not run here."""

    @staticmethod
    def as_environment(name: str) -> Any:
        from environments.adapters.remote import RemoteAnswer, RemoteEnvironment
        from gspo_core.types import Split

        class Line:
            is_busy = False

            async def tools(self) -> Any:
                return [Far._tool]

            async def begin(self, task: Any, seed: int) -> Any:
                return [{"role": "user", "content": "go"}]

            async def call(self, name: str, arguments: Any) -> Any:
                await asyncio.sleep(arguments["seconds"])
                return RemoteAnswer("rested")

            async def score(self, messages: Any) -> Any:
                return 1.0, {}

        @contextlib.asynccontextmanager
        async def connect() -> Any:
            try:
                yield Line()
            except asyncio.CancelledError:
                raise ConnectionResetError("it ends badly") from None

        return RemoteEnvironment(name, connect, {Split.TRAIN: [{}], Split.EVAL: []}, reward_range=(-1.0, 1.0))

    _tool = {"type": "function", "function": {"name": "rest", "description": "Wait.", "parameters": {}}}  # noqa: RUF012


class Shared:
    """Sync and replayable: several sessions share a process, each with a thread."""

    tasks = [{"start": number} for number in range(10)]  # noqa: RUF012
    replayable = True
    reward_range = (-1.0, 10.0)

    def reset(self, start: int) -> str:
        self.total = start
        return f"You have {start}."

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.total += amount
        return str(self.total)

    def block(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "blocked"

    def die(self, how: str, after: float = 0.0) -> str:
        """Kill the process.

        Args:
            how: exit or a signal
            after: when
        """
        time.sleep(after)
        return die(how)

    def where(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    def pay(self, folder: str, seconds: float) -> str:
        """Pay, and be slow afterwards.

        Args:
            folder: where that is written down
            seconds: how slow
        """
        return pay(folder, seconds)

    def get_reward(self) -> float:
        return float(self.total)


class Keeper:
    """Sync, with snapshots, and not replayable: its tools answer differently each time."""

    tasks = [{"start": number} for number in range(10)]  # noqa: RUF012

    def reset(self, start: int) -> str:
        self.total = start
        return f"It is {time.monotonic()}."

    def add(self, amount: int, ctx: Any) -> str:
        """Add.

        Args:
            amount: how much
        """
        self.total += amount
        ctx.metric("largest", max(self.total, ctx.metrics.get("largest", 0)))
        return f"{self.total} at {time.monotonic()}"

    def on_message(self, text: str) -> None:
        self.total += 100

    def where(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    def pay(self, folder: str, seconds: float) -> str:
        """Pay, and be slow afterwards.

        Args:
            folder: where that is written down
            seconds: how slow
        """
        return pay(folder, seconds)

    def snapshot(self) -> bytes:
        return str(self.total).encode() + b" " * (16 << 20 if self.total == 13 else 0)

    def restore(self, state: bytes) -> None:
        self.total = int(state)

    def get_reward(self) -> float:
        return float(self.total)


class Unhurried:
    """Takes its time for each member, and none too long."""

    taken_s = 0.0

    def reset(self) -> str:
        return "go"

    def wait(self, seconds: float) -> str:
        """Wait, and from now on with every member.

        Args:
            seconds: how long
        """
        self.taken_s = seconds
        time.sleep(seconds)
        return "waited"

    def snapshot(self) -> bytes:
        time.sleep(self.taken_s)
        return b"kept"

    def restore(self, state: bytes) -> None: ...

    def get_reward(self) -> float:
        return 1.0


class Alone:
    """Sync and not replayable: a process for each session."""

    reward_range = (-2.0, 1.0)
    hosting = {"max_processes": 2, "memory_mb": 128, "file_mb": 1}  # noqa: RUF012

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble

    def reset(self) -> str:
        if self.trouble == "hanging reset":
            time.sleep(60)
        if self.trouble == "crashing reset":
            die("SIGSEGV")
        return "go"

    def where(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    def block(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "blocked"

    def explode(self) -> str:
        """Raise."""
        raise RuntimeError("boom")

    def die(self, how: str) -> str:
        """Kill the process.

        Args:
            how: exit or a signal
        """
        return die(how)

    def hog(self) -> str:
        """Take memory, little by little."""
        held = []
        while True:
            held.append(bytearray(b"x") * (1 << 20))

    def spike(self) -> str:
        """Take memory for a moment."""
        return str(len(bytearray(b"x") * (160 << 20)))

    def map(self, path: str) -> str:
        """Read every page of a file that stays mapped.

        Args:
            path: of the file
        """
        with open(path, "rb") as file:
            self.mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return str(sum(self.mapped[:: mmap.PAGESIZE]))

    def unmap(self) -> str:
        """Let the file go."""
        self.mapped.close()
        return "closed"

    def grab(self) -> str:
        """Take far too much memory at once."""
        return str(len(bytearray(1 << 40)))

    def fill(self, size: int) -> str:
        """Write a file.

        Args:
            size: bytes
        """
        with open(os.path.join(os.environ["TMPDIR"], "large"), "wb") as file:
            file.write(b"x" * size)
        return "written"

    def shout(self, size: int) -> str:
        """Print a lot.

        Args:
            size: bytes
        """
        print("x" * size)
        return "shouted"

    def speak(self, size: int) -> str:
        """Answer at length.

        Args:
            size: characters
        """
        return "x" * size

    def daemonise(self) -> str:
        """Leave a process behind."""
        return daemonise()

    def variables(self) -> list[str]:
        """Tell what the process was given."""
        return sorted(os.environ)

    def get_reward(self) -> Any:
        if self.trouble == "crashing reward":
            die("SIGSEGV")
        return 1.0


class Undefined(Alone):
    """Reports numbers that are none, beside one that is."""

    def rate(self, ctx: Any) -> str:
        """Report."""
        ctx.metric("rate", float("nan"))
        ctx.metric("loss", float("inf"))
        ctx.metric("rated", 1.0)
        return "rated"

    def get_reward(self, ctx: Any) -> float:
        ctx.metric("mean", float("nan"))
        return 0.5


class Fickle(Shared):
    """Says that it can be replayed, and cannot."""

    def reset(self, start: int) -> str:
        super().reset(start)
        return f"It is {time.monotonic()}."
