"""A Gymnasium environment with a discrete action space: one tool, ``act``, whose argument is the name of an action.

The reward is the sum of what its steps paid. A step after the end is refused: Gymnasium would repeat the last state.
"""

# /// script
# dependencies = ["gymnasium[toy-text]==1.4.0"]
# ///

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Literal

from gspo_core.env import InvalidEnvironment
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TERMINAL_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
EVAL_SEED = 1_000_000
"""Held-out tasks begin here, far from those that are trained."""


def gym(
    id: str,
    actions: tuple[str, ...] | list[str] = (),
    *,
    num_tasks: int = 1000,
    num_eval_tasks: int = 100,
    show: Literal["observation", "render"] = "observation",
    prompt: str = "",
    replayable: bool = False,
    options: dict[str, JSON] | None = None,
) -> _Game:
    """An instance for one episode. ``actions`` name the numbers of the action space in order; ``options`` go to
    ``gymnasium.make``. Say ``replayable`` where a seed decides everything, as in the toy-text worlds."""
    cls = _make_class(id, tuple(actions), num_tasks, num_eval_tasks, replayable)
    return cls(id, show, prompt, dict(options or {}))


@cache
def _make_class(
    id: str, actions: tuple[str, ...], num_tasks: int, num_eval_tasks: int, replayable: bool
) -> type[_Game]:
    names = actions or tuple(str(number) for number in range(_num_actions(id)))
    if len(names) != _num_actions(id):
        raise InvalidEnvironment(f"{id} has {_num_actions(id)} actions, but {len(names)} are named: {list(names)}")

    class Gym(_Game):
        tasks = tuple({"game_seed": seed} for seed in range(num_tasks))
        eval_tasks = tuple({"game_seed": EVAL_SEED + seed} for seed in range(num_eval_tasks))

        def act(self, action: str) -> str:
            """Take one action.

            Args:
                action: its name
            """
            return self._step(names.index(action))

    Gym.act.__annotations__["action"] = Literal[names]
    Gym.__doc__ = None
    Gym.replayable = replayable  # type: ignore[attr-defined]
    return Gym


def _num_actions(id: str) -> int:
    import gymnasium

    space = gymnasium.spec(id)
    game = gymnasium.make(space)
    try:
        if not isinstance(game.action_space, gymnasium.spaces.Discrete):
            raise InvalidEnvironment(f"{id} has the action space {game.action_space}; only discrete ones have names")
        return int(game.action_space.n)
    finally:
        game.close()


class _Game:
    """What all episodes of all games have in common."""

    def __init__(self, id: str, show: str, prompt: str, options: dict[str, JSON]) -> None:
        import gymnasium

        self._render = show == "render"
        self._prompt = prompt
        self._game = gymnasium.make(id, **options, **({"render_mode": "ansi"} if self._render else {}))
        self.done = False
        self._total = 0.0

    def reset(self, game_seed: int) -> str:
        observation, _ = self._game.reset(seed=game_seed)
        self.done, self._total = False, 0.0
        return self._prompt + self._text(observation)

    def get_reward(self) -> float:
        return self._total

    def close(self) -> None:
        self._game.close()

    def _step(self, action: int) -> str:
        if self.done:
            raise ValueError("the game is over")
        observation, reward, terminated, truncated, _ = self._game.step(action)
        self._total += float(reward)
        self.done = bool(terminated or truncated)
        return self._text(observation)

    def _text(self, observation: int | tuple[int, ...] | NDArray[np.generic]) -> str:
        if self._render:
            return _TERMINAL_COLOUR.sub("", str(self._game.render()))
        plain = observation.tolist() if hasattr(observation, "tolist") else observation
        return str(plain)
