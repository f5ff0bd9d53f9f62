"""The first rank's calls to the others, as bytes: msgpack, with arrays as raw buffers.

Rule: a message carries or names everything a rank needs to do the same as the first, and nothing executable. What lies
in the shared directory is named: a step is its batch log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gspo_core.batch import TrainSequence

COMMANDS, WEIGHTS, STATE = "commands", "weights", "state"
LINES = (COMMANDS, WEIGHTS, STATE)
"""One line for collective compute, and one each for writing weights and state meanwhile."""

_ARRAYS = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "turn_ids": np.int32,
    "staleness": np.int32,
}


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A ``TrainSequence`` in wire form. Only what is scored travels so: no log holds it, or none yet."""

    arrays: dict[str, bytes]
    advantages: float | bytes
    weight: float
    temperature: float
    group: int | None


class RankCall(msgspec.Struct, tag=True):
    """Base of every message on a line."""


class Beat(RankCall):
    """Keep-alive with nothing to do. Not answered."""


class End(RankCall):
    """Ends the process. Not answered."""


class Look(RankCall):
    """Check that this rank sees a file the first rank wrote."""

    path: str


class Build(RankCall):
    """Build a learner, replacing the previous one."""

    job: str
    """The job's directory."""
    model: str
    config: bytes
    objective: bytes
    seed: int
    device: str


class ReadStep(RankCall):
    """Read the batch that the first rank has logged; ``Step`` follows once every rank has it."""

    epoch: int
    step: int


class Step(RankCall):
    """Train on the batch that was read."""


class Logprobs(RankCall):
    sequences: list[Wire]
    sampled_only: bool


class Retune(RankCall):
    config: bytes
    objective: bytes


class Keep(RankCall):
    """Copy this rank's share of the weights or the state. ``dropped`` lists copies to free."""

    kind: str
    number: int
    dropped: list[int]


class Prepare(RankCall):
    """Read and check this rank's share of a state; ``Load`` follows once every rank succeeds."""

    directory: str


class Load(RankCall): ...


class Close(RankCall):
    """The job is over: drop its learner."""


class Write(RankCall):
    """Write this rank's share of a copy into a directory."""

    number: int
    directory: str


AnyCall = Beat | End | Look | Build | ReadStep | Step | Logprobs | Retune | Keep | Prepare | Load | Close | Write
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
            one.group,
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
            group=one.group,
        )
        for one in wires
    ]
