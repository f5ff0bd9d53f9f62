"""Angle and distance of two expected gradients, from batches of noisy ones, with intervals.

Rule: products are of different batches only, so noise adds nothing to a length. Intervals are by leaving out each batch
once, of either side; differences of two estimators leave out the same batch of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Z95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """A number with half of its 95 % interval."""

    value: float
    margin: float

    def excludes_zero(self) -> bool:
        return abs(self.value) > self.margin


@dataclass(frozen=True)
class Series:
    """A number from all batches, then without each of its own, then without each of the reference's."""

    whole: float
    without_own: Floats
    without_reference: Floats

    def estimate(self) -> Estimate:
        variance = sum((len(one) - 1) * float(one.var()) for one in (self.without_own, self.without_reference))
        return Estimate(self.whole, Z95 * math.sqrt(variance))

    def __sub__(self, other: Series) -> Series:
        """For the same batches on both sides."""
        return Series(
            self.whole - other.whole,
            self.without_own - other.without_own,
            self.without_reference - other.without_reference,
        )


def of_own(whole: float, without_each: Sequence[float]) -> Series:
    """A number that has nothing to do with the reference, from all batches and without each."""
    return Series(whole, np.array(without_each), np.zeros(1))


class Comparison:
    """Gradients of batches, one a row, beside those of the reference."""

    def __init__(self, own: Floats, reference: Floats) -> None:
        self._own = _Products(own @ own.T)
        self._reference = _Products(reference @ reference.T)
        self._cross_KK = own @ reference.T

    def cosine(self) -> Series:
        return self._series(lambda own, cross, reference: cross / np.sqrt(np.maximum(own * reference, 1e-300)))

    def bias(self) -> Series:
        """Length of the difference of the expected gradients, as a share of the reference's."""
        return self._series(lambda own, cross, ref: np.sqrt(np.maximum(own - 2 * cross + ref, 0) / ref))

    def scale(self) -> float:
        """How many times as long as the reference's part in its direction."""
        return float(self._cross_KK.mean() / self._reference.squared_length)

    def noise(self) -> Series:
        """Variance of one batch's gradient, as a multiple of the squared length of the reference's expected one."""
        own, reference = self._own.mean_square - self._own.squared_length, self._reference.squared_length
        without_own = self._own.mean_square_without() - self._own.without()
        return Series(own / reference, without_own / reference, own / self._reference.without())

    def _series(self, statistic: Callable[[Floats, Floats, Floats], Floats]) -> Series:
        cross, (rows, columns) = self._cross_KK, self._cross_KK.shape
        own, reference = np.array(self._own.squared_length), np.array(self._reference.squared_length)
        without_row = (cross.sum() - cross.sum(axis=1)) / ((rows - 1) * columns)
        without_column = (cross.sum() - cross.sum(axis=0)) / (rows * (columns - 1))
        return Series(
            float(statistic(own, np.array(cross.mean()), reference)),
            statistic(self._own.without(), without_row, reference),
            statistic(own, without_column, self._reference.without()),
        )


class _Products:
    """Of gradients of one kind with each other."""

    def __init__(self, products: Floats) -> None:
        self._products_KK = products
        self._squares_K = np.diag(products)
        self.mean_square = float(self._squares_K.mean())

    @property
    def squared_length(self) -> float:
        """Of the expected gradient: the mean product of two different ones."""
        count = len(self._squares_K)
        return float((self._products_KK.sum() - self._squares_K.sum()) / (count * (count - 1)))

    def mean_square_without(self) -> Floats:
        """The mean square without each."""
        found: Floats = (self._squares_K.sum() - self._squares_K) / (len(self._squares_K) - 1)
        return found

    def without(self) -> Floats:
        """The squared length without each."""
        count = len(self._squares_K) - 1
        total = self._products_KK.sum() - 2 * self._products_KK.sum(axis=1) + self._squares_K
        squares = self._squares_K.sum() - self._squares_K
        found: Floats = (total - squares) / (count * (count - 1))
        return found
