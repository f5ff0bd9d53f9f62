"""A policy that is a table, and a task whose every step decides the next state.

The policy draws one of 16 symbols; what it knows is the two before. For each pair of symbols one symbol is wanted. The
reward is the share of symbols that were wanted, counted only where the one before was wanted too: one mistake costs two
places, and where it leads to, the policy has to go on from. Log-probs under any version are looked up, so nothing is
approximated but by sampling.

Shapes: B episodes, T places in them, N contexts, V symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.advantage import group_advantages
from gspo_core.objective_config import AdvantageConfig

NUM_SYMBOLS = 16
NUM_CONTEXTS = NUM_SYMBOLS**2
GROUP_SIZE = 8
LOGIT_SCALE = 1.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Episodes:
    """Whole groups, side by side."""

    contexts_BT: Ints
    symbols_BT: Ints
    versions_BT: Ints
    """Which of the given weights drew each symbol."""
    advantages_B: Floats


class World:
    """What is wanted, and with which policy training begins; both follow from the seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._wanted_N = rng.integers(NUM_SYMBOLS, size=NUM_CONTEXTS)
        self.untrained_NV: Floats = rng.normal(0, LOGIT_SCALE, (NUM_CONTEXTS, NUM_SYMBOLS))

    def play(self, weights: Sequence[Floats], versions_T: Ints, num_groups: int, rng: np.random.Generator) -> Episodes:
        """Episodes whose t-th symbol is drawn by ``weights[versions_T[t]]``. A group begins in one context."""
        chances = np.cumsum(np.exp(np.stack([log_probs(one) for one in weights])), axis=-1)
        count, length = num_groups * GROUP_SIZE, len(versions_T)
        context_B = np.repeat(rng.integers(NUM_CONTEXTS, size=num_groups), GROUP_SIZE)
        contexts, symbols = np.empty((2, length, count), dtype=np.int64)
        for place in range(length):
            chance = chances[versions_T[place], context_B]
            symbol_B = np.minimum((rng.random((count, 1)) >= chance).sum(axis=1), NUM_SYMBOLS - 1)
            contexts[place], symbols[place] = context_B, symbol_B
            context_B = context_B % NUM_SYMBOLS * NUM_SYMBOLS + symbol_B
        wanted = symbols == self._wanted_N[contexts]
        rewards_B = (wanted[1:] & wanted[:-1]).mean(axis=0)
        groups = rewards_B.reshape(num_groups, GROUP_SIZE)
        advantages = [group_advantages(group.tolist(), AdvantageConfig()) for group in groups]
        versions_BT = np.broadcast_to(versions_T, (count, length))
        return Episodes(contexts.T, symbols.T, versions_BT, np.concatenate(advantages))

    def success(self, weights_NV: Floats, length: int, rng: np.random.Generator) -> float:
        """Share of wanted symbols."""
        episodes = self.play([weights_NV], np.zeros(length, np.int64), 64, rng)
        return float((episodes.symbols_BT == self._wanted_N[episodes.contexts_BT]).mean())


def log_probs(weights_NV: Floats) -> Floats:
    shifted: Floats = weights_NV - weights_NV.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def gradient(coefficients_BT: Floats, episodes: Episodes, weights_NV: Floats) -> Floats:
    """Of the weights, where ``coefficients_BT`` is that of each drawn symbol's log-prob under them."""
    places = episodes.contexts_BT * NUM_SYMBOLS + episodes.symbols_BT
    drawn = np.bincount(places.ravel(), coefficients_BT.ravel(), NUM_CONTEXTS * NUM_SYMBOLS)
    drawn_NV = drawn.reshape(NUM_CONTEXTS, NUM_SYMBOLS)
    found: Floats = drawn_NV - drawn_NV.sum(axis=1, keepdims=True) * np.exp(log_probs(weights_NV))
    return found


def true_gradient(episodes: Episodes, weights_NV: Floats) -> Floats:
    """Of episodes that these weights drew: each counts alike and is cleared of nothing."""
    count, length = episodes.symbols_BT.shape
    coefficients_BT = np.broadcast_to(-episodes.advantages_B[:, None] / (count * length), (count, length))
    return gradient(coefficients_BT, episodes, weights_NV)


@dataclass
class Adam:
    """As AdamW without decay of weights."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        self._mean = self._square = np.zeros((NUM_CONTEXTS, NUM_SYMBOLS))
        self._count = 0

    def updated(self, weights_NV: Floats, gradient_NV: Floats) -> Floats:
        first, second = self.betas
        self._count += 1
        self._mean = first * self._mean + (1 - first) * gradient_NV
        self._square = second * self._square + (1 - second) * gradient_NV**2
        mean, square = self._mean / (1 - first**self._count), self._square / (1 - second**self._count)
        found: Floats = weights_NV - self.lr * mean / (np.sqrt(square) + 1e-8)
        return found


def train(world: World, length: int, num_versions: int, lr: float, rng: np.random.Generator) -> list[Floats]:
    """The weights after each step of on-policy training, four updates a step, the untrained first."""
    adam, weights_NV = Adam(lr), world.untrained_NV
    found = [weights_NV]
    for _ in range(num_versions):
        for _ in range(4):
            episodes = world.play([weights_NV], np.zeros(length, np.int64), 12, rng)
            weights_NV = adam.updated(weights_NV, true_gradient(episodes, weights_NV))
        found.append(weights_NV)
    return found
