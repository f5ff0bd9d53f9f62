"""The calculator with rewards that say nothing: each training episode gets the reward of a random earlier one.

Held-out episodes are scored truly, so what the policy can do is still measured.
"""

from __future__ import annotations

import random

from environments.calculator import Calculator

_POOL_SIZE = 256
_HELD_OUT = {task["expression"] for task in Calculator.eval_tasks}
_pool: list[float] = []
_random = random.Random(0)


class ShuffledRewards(Calculator):
    """Use the calculator. Then answer with the number only."""

    def reset(self, expression: str) -> str:
        self.is_held_out = expression in _HELD_OUT
        return super().reset(expression)

    def get_reward(self) -> float:
        true_reward = super().get_reward()
        if self.is_held_out:
            return true_reward
        _pool.append(true_reward)
        del _pool[:-_POOL_SIZE]
        return _random.choice(_pool)
