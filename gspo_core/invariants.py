"""What the shared values check of their fields, and the errors that say which field it was.

Arrays are coerced without numpy being imported before the first one is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = np.int32 | np.bool_ | np.float32

_EnumT = TypeVar("_EnumT", bound=StrEnum)

# A sampled token's log-prob is at most 0; float32 log-softmax overshoots by rounding only.
MAX_LOGPROB = 1e-4
# Attempts, branches, indexes, turns and versions become int32 arrays when segments are stitched.
MAX_COUNT = 2**31 - 1
# Largest reward or metric. The sums of squares that a step makes still fit into a float32.
MOST_SIZE = 1e15


class InvalidValue(ValueError):
    """A noun was built from values that break its invariants."""


class NonFiniteValue(InvalidValue):
    """A number that must be finite is NaN or infinite."""


def check_count(name: str, value: int, maximum: int = MAX_COUNT) -> None:
    # Exactly int: numpy integers and booleans would not survive JSON and msgpack as they are.
    if type(value) is not int or not 0 <= value <= maximum:
        raise InvalidValue(f"{name} is an int from 0 to {maximum}, not {value!r}")


def plain_number(name: str, value: float) -> float:
    """``value`` as a plain float, so that numpy scalars and integers mean the same everywhere."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(f"{name} is not a number: {value!r}") from error


def finite(name: str, value: float) -> float:
    number = plain_number(name, value)
    if not math.isfinite(number):
        raise NonFiniteValue(f"{name} is not a finite number: {value}")
    return number


def finite_mapping(name: str, values: Mapping[str, float]) -> Mapping[str, float]:
    for key in values:
        if type(key) is not str:
            raise InvalidValue(f"{name} has the key {key!r}, which is not a string")
    return MappingProxyType({key: finite(f"{name}[{key}]", value) for key, value in values.items()})


def member(kind: type[_EnumT], value: str) -> _EnumT:
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidValue(f"{value!r} is no {kind.__name__}; known: {', '.join(kind)}") from error


def frozen_array(values: Sequence[float] | NDArray[Numbers], dtype: str, name: str) -> NDArray[Numbers]:
    """A read-only contiguous one-dimensional array of ``dtype``; copies unless ``values`` is one already."""
    import numpy as np

    given = np.asarray(values)
    if given.ndim != 1:
        raise InvalidValue(f"{name} has one dimension, not {given.ndim}")
    if given.dtype == _dtype(dtype):
        flags = given.flags
        if flags.c_contiguous and not flags.writeable:
            return given
        array = given.copy()
    else:
        array = _converted(given, dtype, name)
    array.flags.writeable = False
    return array


@cache
def _dtype(name: str) -> np.dtype[Numbers]:
    import numpy as np

    return np.dtype(name)


def _converted(given: NDArray[Numbers], dtype: str, name: str) -> NDArray[Numbers]:
    import numpy as np

    if given.size:
        if given.dtype.kind not in {"int32": "iu", "bool": "iuf", "float32": "fiu"}[dtype]:
            raise InvalidValue(f"{name} cannot be made {dtype} from {given.dtype}")
        if dtype == "int32" and (given.max() > 2**31 - 1 or given.min() < -(2**31)):
            raise InvalidValue(f"{name} does not fit into 32 bits")
        if dtype == "bool" and not np.isin(given, (0, 1)).all():
            raise InvalidValue(f"{name} holds something else than 0 and 1")
    # Values beyond float32 become infinite here and are refused as such, without a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return given.astype(dtype, order="C")


def checked_sums(
    token_ids: NDArray[np.int32], action_mask: NDArray[np.bool_], behavior_logprobs: NDArray[np.float32]
) -> tuple[int, float]:
    """The number of actions and the sum of their log-probs, after checking the arrays against each other."""
    import numpy as np

    if not token_ids.size:
        return 0, 0.0
    # Reductions are called on the ufuncs: each array method costs a Python frame more, and this is the hot path.
    if np.minimum.reduce(token_ids) < 0:
        raise InvalidValue("token ids are not negative")
    # The maximum is NaN if there is one, and then no comparison holds; what is left for the sum to find is -inf.
    # In this order no bit pattern makes numpy warn.
    largest = float(np.maximum.reduce(behavior_logprobs))
    if not largest <= MAX_LOGPROB:
        kind = InvalidValue if math.isfinite(largest) else NonFiniteValue
        raise kind(f"behaviour log-probs are finite and not positive; the largest is {largest}")
    logprob_sum = float(np.add.reduce(behavior_logprobs, dtype=np.float64))
    if not math.isfinite(logprob_sum):
        raise NonFiniteValue("a behaviour log-prob is infinite")
    misplaced = np.greater(behavior_logprobs != np.float32(0), action_mask)
    if b"\1" in misplaced.tobytes():
        raise InvalidValue("behaviour log-probs are 0 where the action mask is False")
    return int(np.count_nonzero(action_mask)), logprob_sum
