"""The sandboxes that a server holds, by unguessable ids, and the operations done in each.

Rule: requests with the same operation id are done once and get the same answer. A sandbox whose lease is not renewed is
closed; a running request renews it. No client is told of the other sandboxes.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from environments.sandbox.contract import Sandbox, Sandboxes, SandboxFailed

T = TypeVar("T")
_MOST_REMEMBERED = 64


class NoSandbox(Exception):
    """No sandbox has this id, or it was closed."""


class TableFull(Exception):
    """As many are held as may be."""


@dataclass
class _Held:
    sandbox: Sandbox
    until: float
    num_running: int = 0
    done: OrderedDict[str, Future[object]] = field(default_factory=OrderedDict)
    acting: threading.Lock = field(default_factory=threading.Lock)


class Table:
    """``lease_s``: None if the owner of the table closes it."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        lease_s: float | None = None,
        most: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes = sandboxes
        self.lease_s = lease_s
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._made: OrderedDict[str, Future[str]] = OrderedDict()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._held)

    def create(self, operation: str, base: str) -> tuple[str, str]:
        """Its id and its root. Raises ``SandboxFailed``, ``TableFull``."""
        with self._lock:
            made = self._made.get(operation)
            is_first = made is None
            if made is None:
                if len(self._held) + sum(not one.done() for one in self._made.values()) >= self._most:
                    raise TableFull
                made = self._made[operation] = Future()
        if is_first:
            try:
                made.set_result(self._keep(self._sandboxes.create(base)))
            except BaseException as error:
                with self._lock:
                    del self._made[operation]
                made.set_exception(error)
        number = made.result()
        with self.using(number) as sandbox:
            return number, sandbox.root

    @contextlib.contextmanager
    def using(self, number: str) -> Iterator[Sandbox]:
        """One at a time; meanwhile its lease does not end. Raises ``NoSandbox``."""
        held = self._found(number)
        try:
            with held.acting:
                yield held.sandbox
        finally:
            with self._lock:
                held.num_running -= 1
                held.until = self._renewed()

    def once(self, number: str, operation: str, do: Callable[[Sandbox], T]) -> T:
        """Raises what ``do`` raises, again for each repetition, and ``NoSandbox``."""
        held = self._found(number)
        try:
            with self._lock:
                answer: Future[object] | None = held.done.get(operation)
                is_first = answer is None
                if answer is None:
                    answer = held.done[operation] = Future()
                    while len(held.done) > _MOST_REMEMBERED:
                        held.done.popitem(last=False)
            if is_first:
                try:
                    with held.acting:
                        answer.set_result(do(held.sandbox))
                except BaseException as error:
                    answer.set_exception(error)
            return answer.result()  # type: ignore[return-value]
        finally:
            with self._lock:
                held.num_running -= 1
                held.until = self._renewed()

    def renew(self, number: str) -> None:
        with self._lock:
            if number not in self._held:
                raise NoSandbox
            self._held[number].until = self._renewed()

    def delete(self, number: str) -> None:
        with self._lock:
            held = self._held.pop(number, None)
            for operation, made in list(self._made.items()):
                if made.done() and made.exception() is None and made.result() == number:
                    del self._made[operation]
        if held is not None:
            held.sandbox.close()

    def sweep(self) -> int:
        """Closes those whose lease is over; how many."""
        with self._lock:
            now = self._clock()
            over = [number for number, held in self._held.items() if held.until < now and not held.num_running]
        for number in over:
            with contextlib.suppress(SandboxFailed):
                self.delete(number)
        return len(over)

    def close(self) -> None:
        self._is_closed = True
        for number in list(self._held):
            with contextlib.suppress(SandboxFailed):
                self.delete(number)

    def _keep(self, sandbox: Sandbox) -> str:
        number = secrets.token_hex(16)
        with self._lock:
            if not self._is_closed:
                self._held[number] = _Held(sandbox, self._renewed())
                return number
        sandbox.close()
        raise SandboxFailed("the server is closing")

    def _found(self, number: str) -> _Held:
        """It runs something from now on."""
        with self._lock:
            held = self._held.get(number)
            if held is None:
                raise NoSandbox
            held.num_running += 1
            return held

    def _renewed(self) -> float:
        return float("inf") if self.lease_s is None else self._clock() + self.lease_s
