"""How far one step may move the policy, and what is done with a step that went too far.

One rule: a step is judged as a whole, by what it did to the policy on the sequences of its batch - with those that
teach nothing, because a policy is damaged where it was good. A step that went too far is taken back along its own path
until the policy is within the bound. It chooses no bound and computes no gradient.

The clip cannot do this: it judges each sequence before an update and not after it, and nothing of what an optimizer
makes of a long gradient behind many short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.bounds import exceeds

# Along a short way k3 grows with its square, so one correction nearly always does; a little less than the bound allows
# leaves room for the difference.
MARGIN = 0.95
NARROWEST, WIDEST = 0.1, 0.9
"""A correction leaves at least and at most these shares of the way, whatever was measured."""
MAX_CORRECTIONS = 6
"""After so many the step is taken back wholly: the policy is not what it was even a thousandth of the way along."""
# Beyond it exp is just a huge number.
LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class StepLength:
    """What became of a step."""

    k3: float
    """How far it went, before anything was taken back."""
    kept: float
    """The share of the way that is left: 1 for a step within the bound, 0 for one that was taken back wholly."""


def hold_step(bound: float, measure: Callable[[], float], keep: Callable[[float], None]) -> StepLength:
    """Shorten a step until `measure` is within `bound`. `keep` is given the share to keep of the way as it is then."""
    went = found = measure()
    kept = 1.0
    for _ in range(MAX_CORRECTIONS):
        if not exceeds(found, bound):
            return StepLength(went, kept)
        share = MARGIN * math.sqrt(bound / found) if math.isfinite(found) else NARROWEST
        share = min(max(share, NARROWEST), WIDEST)
        keep(share)
        kept *= share
        found = measure()
    if exceeds(found, bound):
        keep(0.0)
        kept = 0.0
    return StepLength(went, kept)


def mean_k3(before: Sequence[NDArray[np.float32]], after: Sequence[NDArray[np.float32]], num_tokens: int) -> float:
    """k3 of the policy after a step against that before it, mean over the sampled tokens; 0 without any.

    The rows hold log-probs, and the same number in both at every place that was not sampled.
    """
    total = 0.0
    for first, second in zip(before, after, strict=True):
        moved = np.minimum(second.astype(np.float64) - first, LARGEST_EXPONENT)
        total += float((np.expm1(moved) - moved).sum())
    return total / max(1, num_tokens)


class StepStart:
    """Weights and first moments as a step found them: as much memory as both.

    Second moments are never taken back. They remember that the gradients were long, which makes the next steps shorter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found = [tensor.clone() for tensor in self._tensors()]
        self._had_moments = len(self._found) > self._num_parameters

    def keep(self, share: float) -> None:
        """Keep this share of the way from the start to where weights and moments are now."""
        now = self._tensors()
        found = self._found
        if not self._had_moments:
            found = [*found, *(torch.zeros_like(tensor) for tensor in now[len(found) :])]
        for tensor, start in zip(now, found, strict=True):
            tensor.copy_(start + share * (tensor - start) if share else start)

    @property
    def _num_parameters(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def _tensors(self) -> list[Tensor]:
        """Weights, then first moments where there are any."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
        moments = [state["exp_avg"] for state in states if "exp_avg" in state]
        return [tensor.detach() for tensor in (*parameters, *moments)]
