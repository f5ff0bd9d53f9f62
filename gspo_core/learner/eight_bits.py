"""A matrix of numbers in eight bits each, for the moments of AdamW.

One rule: what a number becomes depends on its row alone, so any number of ranks that share rows rounds alike. Blocks of
256 numbers of a row share a scale, their largest number; a code is the fourth root of a number's share of it, which
reaches over ten powers of ten. Rounding goes up or down by a sequence of the step, not to the nearest: a running mean
moves by less than a code in a step, and the nearest code would be the one that it had.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_core.plan import BLOCK, ROUNDED_AT_ONCE

SIGNED_LEVELS, LEVELS = 127, 255
# Multiples of these spread evenly between 0 and 1, as does each beside the other (the plastic number's powers).
_OF_STEP, _OF_PLACE = 0.7548776662466927, 0.5698402909980532


class Codes(NamedTuple):
    codes: Tensor
    """uint8, shaped like the numbers."""
    scales: Tensor
    """float32, for each row its blocks."""


def num_blocks(shape: tuple[int, ...]) -> int:
    """Blocks in each row."""
    width = 1
    for size in shape[1:]:
        width *= size
    return -(-width // BLOCK)


def narrowed(values: Tensor, step: int, *, is_signed: bool) -> Codes:
    """The codes of float32 numbers; those that are not signed are never rounded to 0, by whose root AdamW divides."""
    rows = values.flatten(1)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty((len(rows), num_blocks(tuple(values.shape))), device=values.device)
    threshold = _thresholds(step, rows.shape[1], values.device)
    for part in _parts(rows):
        scaled, scales[part] = _shares(rows[part])
        levels = SIGNED_LEVELS if is_signed else LEVELS
        found = scaled.abs().sqrt_().sqrt_().mul_(levels).add_(threshold).floor_().clamp_(max=levels)
        if is_signed:
            found.copysign_(scaled).add_(SIGNED_LEVELS)
        else:
            found.clamp_(min=1).mul_(scaled != 0)
        codes[part] = found.to(torch.uint8)
    return Codes(codes.view(values.shape), scales)


def widened(kept: Codes, *, is_signed: bool) -> Tensor:
    """The numbers of the codes, in float32."""
    rows = kept.codes.flatten(1)
    values = torch.empty(rows.shape, device=rows.device)
    for part in _parts(rows):
        share = rows[part].float()
        if is_signed:
            share.sub_(SIGNED_LEVELS).div_(SIGNED_LEVELS)
        else:
            share.div_(LEVELS)
        power = share.square().square_()
        values[part] = _blocks(power.copysign_(share)).mul_(kept.scales[part][..., None]).flatten(1)[:, : rows.shape[1]]
    return values.view(kept.codes.shape)


def _parts(rows: Tensor) -> list[slice]:
    size = max(1, ROUNDED_AT_ONCE // max(1, rows.shape[1]))
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _blocks(rows: Tensor) -> Tensor:
    """(rows, blocks, 256), the last block of each row filled up with 0."""
    padded = F.pad(rows, (0, -rows.shape[1] % BLOCK))
    return padded.view(len(rows), padded.shape[1] // BLOCK, BLOCK)


def _shares(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each number as a share of the largest of its block, and those."""
    blocks = _blocks(rows)
    scales = blocks.abs().amax(-1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    return shares.flatten(1)[:, : rows.shape[1]], scales


def _thresholds(step: int, width: int, device: torch.device) -> Tensor:
    """Added to a number before it is rounded down, by its place in the row; below 1."""
    places = torch.arange(width, dtype=torch.float64, device=device)
    return ((places * _OF_PLACE + step * _OF_STEP) % 1).float().clamp_(max=1 - 2**-20)
