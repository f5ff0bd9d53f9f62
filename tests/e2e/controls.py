"""The calculator with rewards that say nothing: training episodes are rewarded by lot.

Held-out episodes are scored truly, so what the policy can do is still measured. The lots do not depend on what other
sessions did, since nobody promises in which process a session runs.
"""

from __future__ import annotations

import random

from environments.calculator import Calculator

# About what the untrained demo model gets, so that the rewards are those of its own episodes, shuffled.
_SHARE_REWARDED = 0.3
_HELD_OUT = {task["expression"] for task in Calculator.eval_tasks}


class ShuffledRewards(Calculator):
    """Use the calculator. Then answer with the number only."""

    def reset(self, expression: str) -> str:
        self.is_held_out = expression in _HELD_OUT
        return super().reset(expression)

    def get_reward(self) -> float:
        if self.is_held_out:
            return super().get_reward()
        return float(random.random() < _SHARE_REWARDED)
