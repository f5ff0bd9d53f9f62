"""A game of TextArena: what it says is what the policy reads, what the policy writes is its move.

The policy is player 0; ``opponent`` names a function that moves for all others. Rule: TextArena draws from Python's
shared generator, so each game keeps its own state of that and holds it while it moves: games that are played at the
same time are as if each were alone.
"""

# /// script
# dependencies = ["textarena==0.7.4"]
# ///

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from gspo_core.env import InvalidEnvironment
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    import textarena

Opponent: TypeAlias = Callable[[str], str]
"""From what the game says to another player, to that player's move."""

EVAL_SEED = 1_000_000
"""Held-out tasks begin here, far from those that are trained."""
_POLICY = 0
_GAME = -1
_GENERATOR = threading.Lock()


def game(
    id: str,
    *,
    num_tasks: int = 1000,
    num_eval_tasks: int = 100,
    opponent: str = "",
    num_players: int = 0,
    replayable: bool = False,
    options: dict[str, JSON] | None = None,
) -> _Game:
    """An instance for one episode. ``opponent`` is ``package.module:function``; ``num_players`` is 1 without one, else
    2. ``options`` go to ``textarena.make``. Say ``replayable`` where a seed decides everything."""
    players = num_players or (2 if opponent else 1)
    if (players > 1) != bool(opponent):
        raise InvalidEnvironment(f"{id}: a game of {players} needs {'an' if players > 1 else 'no'} opponent")
    cls = _make_class(num_tasks, num_eval_tasks, replayable)
    return cls(id if id.endswith("-raw") else f"{id}-raw", players, opponent, dict(options or {}))


@cache
def _make_class(num_tasks: int, num_eval_tasks: int, replayable: bool) -> type[_Game]:
    class TextArena(_Game):
        tasks = tuple({"game_seed": seed} for seed in range(num_tasks))
        eval_tasks = tuple({"game_seed": EVAL_SEED + seed} for seed in range(num_eval_tasks))

    TextArena.__doc__ = None
    TextArena.replayable = replayable  # type: ignore[attr-defined]
    return TextArena


class _Game:
    def __init__(self, id: str, num_players: int, opponent: str, options: dict[str, JSON]) -> None:
        import textarena

        self._num_players = num_players
        self._opponent = _function(opponent) if opponent else None
        self._opponent_failure: Exception | None = None
        self._chance = random.getstate()
        with self._own_chance():
            self._game: textarena.Env = textarena.make(env_id=id, **options)
        self.done = False

    def reset(self, game_seed: int) -> str:
        with self._own_chance():
            self._game.reset(num_players=self._num_players, seed=game_seed)
            self.done = False
            return self._until_policys_turn()

    def on_message(self, text: str) -> str:
        """The policy's move, and those of the others until it is the policy's turn again."""
        with self._own_chance():
            self._move(text)
            return self._until_policys_turn()

    def get_reward(self) -> float:
        """The game's reward; 0 if a limit of the episode ended it."""
        if self._opponent_failure is not None:
            raise self._opponent_failure
        if not self.done:
            return 0.0
        with self._own_chance():
            rewards, _ = self._game.close()
        return float(rewards[_POLICY])

    def _move(self, text: str) -> None:
        self.done, _ = self._game.step(text)

    def _until_policys_turn(self) -> str:
        while not self.done:
            player, said = self._game.get_observation()
            if player == _POLICY:
                return _text(said, player)
            assert self._opponent is not None
            try:
                move = self._opponent(_text(said, player))
            except Exception as error:  # not the policy's fault: the episode gets no reward
                self._opponent_failure, self.done = error, True
                break
            self._move(move)
        return "The game is over."

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        with _GENERATOR:
            shared = random.getstate()
            random.setstate(self._chance)
            try:
                yield
            finally:
                self._chance = random.getstate()
                random.setstate(shared)


def _text(said: list[tuple[int, str, textarena.ObservationType]], player: int) -> str:
    """Without an echo of the player's own move: that is in the conversation."""
    echo = (_GAME, player)
    return "\n".join(text for sender, text, kind in said if kind.name != "PLAYER_ACTION" or sender not in echo)


def _function(ref: str) -> Opponent:
    module, _, name = ref.rpartition(":")
    try:
        found: Opponent = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidEnvironment(f"there is no opponent {ref}: {error}") from None
    return found
