"""Turns deltas into tensors: from what the engine holds to the next version, or to a refusal that changed nothing.

Rule: what the engine holds must have the digest of the first delta's base, and what comes out that of the last one's
result; only then are there tensors to switch to. Weights that are held in another precision than they are published in
have lost the bits that a delta builds on, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.files import weight_deltas
from services.files.weight_deltas import Delta, DeltaRefused, TensorDelta, digest_of, read_delta

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Signed, because torch has no arithmetic on unsigned ones; bits are bits.
_SIGNED = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Reached:
    """The end of a chain of deltas."""

    tensors: dict[str, Tensor]
    """Those that changed on the way."""
    label: str
    digest: str


def follow(
    parameters: Mapping[str, Tensor], held: str, directories: Sequence[Path], *, known_digest: str | None = None
) -> Reached:
    """``known_digest``: of what is held, if that was established before. Raises DeltaRefused."""
    bits: dict[str, Tensor] = {}
    for number, directory in enumerate(directories):
        delta = read_delta(directory)
        if delta.header.base != held:
            raise DeltaRefused(f"the delta to {delta.header.label} builds on {delta.header.base}, and {held} is held")
        if number == 0:
            found = known_digest or _digest(parameters, bits, delta)
            _require(delta.header.base_digest, found, f"what is held is not {held}")
        _apply(parameters, bits, delta)
        held = delta.header.label
    _require(delta.header.digest, _digest(parameters, bits, delta), f"the result is not {held}")
    tensors = {name: one.view(parameters[name].dtype) for name, one in bits.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DeltaRefused(f"{name} would contain values that are not finite")
    return Reached(tensors, held, delta.header.digest)


def _apply(parameters: Mapping[str, Tensor], bits: dict[str, Tensor], delta: Delta) -> None:
    for part, indices, values in delta.changes():
        into = bits.setdefault(part.name, _bits(parameters, part).clone())
        signed = values.view(f"i{values.itemsize}")
        if indices is None:
            into.view(-1).copy_(torch.from_numpy(signed.copy()))
            continue
        if len(indices) != len(values) or (len(indices) and indices[-1] >= into.numel()):
            raise DeltaRefused(f"the delta to {delta.header.label} names elements that {part.name} does not have")
        elements, places = into.view(-1), torch.from_numpy(indices)
        elements[places] += torch.from_numpy(signed.copy())


def _digest(parameters: Mapping[str, Tensor], bits: Mapping[str, Tensor], delta: Delta) -> str:
    described = {}
    for part in delta.header.parts:
        one = bits[part.name] if part.name in bits else _bits(parameters, part)
        tensor = weight_deltas.Tensor(part.dtype, tuple(part.shape), one.numpy().view(f"u{one.element_size()}"))
        described[part.name] = part.dtype, part.shape, tensor.sha256()
    return digest_of(described)


def _bits(parameters: Mapping[str, Tensor], part: TensorDelta) -> Tensor:
    """The bits of a tensor that is held, on the CPU."""
    held = parameters.get(part.name)
    if held is None or list(held.shape) != part.shape:
        raise DeltaRefused(f"the delta is of another model: it has {part.name} of shape {part.shape}")
    if _NAMES.get(held.dtype) != part.dtype:
        name = str(held.dtype).removeprefix("torch.")
        raise DeltaRefused(f"{part.name} is published as {part.dtype} and held as {name}: load whole versions")
    return held.detach().cpu().contiguous().view(_SIGNED[held.element_size()])


def _require(wanted: str, found: str, problem: str) -> None:
    if wanted != found:
        raise DeltaRefused(f"{problem}: its digest is another one")
