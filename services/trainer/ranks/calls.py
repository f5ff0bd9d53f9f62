"""What the first rank asks of the others, as bytes: msgpack, arrays as their buffers.

The rule kept here: a message says all that is needed to do the same as the first rank, and nothing in it can be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gspo_core.batch import TrainSequence

COMMANDS, WEIGHTS, STATE = "commands", "weights", "state"
LINES = (COMMANDS, WEIGHTS, STATE)
"""What all compute together; what each writes of weights, and of a state, while they go on computing."""

_ARRAYS = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "turn_ids": np.int32,
    "staleness": np.int32,
}


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A ``TrainSequence`` as it travels."""

    arrays: dict[str, bytes]
    advantages: float | bytes
    weight: float
    temperature: float


class RankCall(msgspec.Struct, tag=True):
    """Everything that is said on a line."""


class Beat(RankCall):
    """Nothing is to do, and the first rank lives. Not answered."""


class End(RankCall):
    """Of the processes. Not answered."""


class Look(RankCall):
    """Whether a file is seen here that the first rank has written."""

    path: str


class Build(RankCall):
    """A learner; the one before is given up."""

    model: str
    config: bytes
    objective: bytes
    seed: int
    device: str


class Step(RankCall):
    sequences: list[Wire]


class Logprobs(RankCall):
    sequences: list[Wire]


class Retune(RankCall):
    config: bytes
    objective: bytes


class Keep(RankCall):
    """Make a copy of this rank's share of the weights or of the state. ``dropped`` are copies that nobody needs."""

    kind: str
    number: int
    dropped: list[int]


class Prepare(RankCall):
    """Read this rank's share of a state and check that it fits; ``Load`` follows when all ranks could."""

    directory: str


class Load(RankCall): ...


class Close(RankCall):
    """The job is over: nothing of its learner is kept."""


class Write(RankCall):
    """This rank's share of a copy into a directory."""

    number: int
    directory: str


AnyCall = Beat | End | Look | Build | Step | Logprobs | Retune | Keep | Prepare | Load | Close | Write
_decoder = msgspec.msgpack.Decoder(AnyCall)


def encode(call: RankCall) -> bytes:
    return msgspec.msgpack.encode(call)


def decode(message: bytes) -> Any:
    """One of ``AnyCall``; raises ValueError."""
    return _decoder.decode(message)


def to_wire(sequences: Sequence[TrainSequence]) -> list[Wire]:
    return [
        Wire(
            {name: getattr(one, name).tobytes() for name in _ARRAYS},
            one.advantages.tobytes() if isinstance(one.advantages, np.ndarray) else float(one.advantages),
            one.weight,
            one.temperature,
        )
        for one in sequences
    ]


def from_wire(wires: Sequence[Wire]) -> list[TrainSequence]:
    return [
        TrainSequence(
            **{name: np.frombuffer(one.arrays[name], dtype) for name, dtype in _ARRAYS.items()},
            advantages=np.frombuffer(one.advantages, np.float32)
            if isinstance(one.advantages, bytes)
            else one.advantages,
            weight=one.weight,
            temperature=one.temperature,
        )
        for one in wires
    ]
