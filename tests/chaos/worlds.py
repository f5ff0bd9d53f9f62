"""The worlds of a chaos run: a sum is added up, and each answer names the episode's run, the count and all before it.

Their tasks have numbers that no other world has, and each has another number of them, so that the tokens of an episode
say which task of which world was played.

An answer that does not follow from the run's own calls, or a second run in one attempt, shows in the tokens. Each act
of a world that must not be repeated goes to a file outside of it, so that what a death undoes stays visible.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import Any, ClassVar

from tests.chaos.attacking import HOST, attack
from tests.chaos.chain import chain


class Replayed:
    """Add up."""

    tasks: ClassVar[list[dict[str, Any]]] = [{"number": number} for number in range(16)]
    eval_tasks: ClassVar[list[dict[str, Any]]] = [{"number": number} for number in range(100, 102)]
    replayable = True

    def __init__(self, ledger: str) -> None:
        self._ledger = ledger

    async def reset(self, number: int, seed: int) -> str:
        self._run = self._name(seed)
        self._count, self._sum, self._chain = 0, 0, ""
        return f"task {number} {self._run}"

    def _name(self, seed: int) -> str:
        return f"{seed:08x}"[-6:]

    async def add(self, number: int) -> str:
        """Add to the sum.

        Args:
            number: what to add
        """
        self._count, self._sum, self._chain = self._count + 1, self._sum + number, chain(self._chain, number)
        self._note()
        return f"{self._run} {self._count} {self._chain}"

    def _note(self) -> None:
        pass

    async def get_reward(self) -> float:
        return (self._sum % 97) / 97


class Fresh(Replayed):
    """Add up."""

    tasks: ClassVar[list[dict[str, Any]]] = [{"number": number} for number in range(300, 311)]
    replayable = False

    def _name(self, seed: int) -> str:
        return uuid.uuid4().hex[:6]

    def _note(self) -> None:
        file = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{self._run} {self._count}\n".encode())
        os.close(file)


class Kept(Fresh):
    """Add up."""

    tasks: ClassVar[list[dict[str, Any]]] = [{"number": number} for number in range(500, 513)]

    async def snapshot(self) -> bytes:
        return json.dumps([self._run, self._count, self._sum, self._chain]).encode()

    async def restore(self, state: bytes) -> None:
        self._run, self._count, self._sum, self._chain = json.loads(state)


class Drawn(Fresh):
    """Add up."""

    async def get_reward(self) -> float:
        """For a model that cannot call anything: chance, so that there is something to learn from."""
        return (int(self._run, 16) % 97) / 97


class Hostile(Fresh):
    """Add up."""

    tasks: ClassVar[list[dict[str, Any]]] = [{"number": number} for number in range(900, 907)]
    hosting: ClassVar[dict[str, int]] = {name: HOST[name] for name in ("sessions_per_process", "memory_mb", "file_mb")}

    def __init__(self, ledger: str, in_turn: bool = False) -> None:
        super().__init__(ledger)
        self._is_in_turn = in_turn

    async def reset(self, number: int, seed: int) -> str:
        """Attacks before anything is said, so that whom it ends is not chosen by what was said."""
        said = await super().reset(number, seed)
        attack(self._ledger, self._run, seed if self._is_in_turn else int(self._run, 16))
        return said


WORLDS = (Replayed, Fresh, Kept)
