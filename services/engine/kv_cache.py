"""Keys and values of the running requests: one row each, rows 0..n-1 without holes, so that a decode step reads views.

Rule: a row belongs to one running request; beyond its length lies garbage, but finite. Rows and their capacity grow by
doubling on demand. The scheduler knows which tokens a row holds.

Keys are stored transposed (head dimension before tokens): the score product then reads memory in order, which halved
its time on a CPU.

Shapes: keys (layers, rows, heads, head dimension, tokens), values (layers, rows, heads, tokens, head dimension); a
prefix is the same without rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_ROWS = 8
_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class KVPrefix:
    """A copy of the first ``length`` tokens of a row."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.values.shape[2]

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class KVCache:
    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros(num_layers, 0, num_heads, head_dim, 0, dtype=dtype, device=device)
        self.values = torch.zeros(num_layers, 0, num_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one request."""
        layers, _, heads, head_dim, _ = self.keys.shape
        return 2 * layers * heads * head_dim * self.keys.element_size()

    def reserve(self, num_rows: int, length: int) -> None:
        """Makes room for ``num_rows`` rows of ``length`` tokens."""
        _, rows, _, _, capacity = self.keys.shape
        if num_rows <= rows and length <= capacity:
            return
        new_rows = _doubled(max(rows, _FIRST_ROWS), num_rows)
        new_capacity = _doubled(max(capacity, _FIRST_CAPACITY), length)
        layers, _, heads, head_dim, _ = self.keys.shape
        keys = self.keys.new_zeros(layers, new_rows, heads, head_dim, new_capacity)
        values = self.values.new_zeros(layers, new_rows, heads, new_capacity, head_dim)
        keys[:, :rows, :, :, :capacity] = self.keys
        values[:, :rows, :, :capacity] = self.values
        self.keys, self.values = keys, values

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def save(self, row: int, length: int) -> KVPrefix:
        return KVPrefix(
            self.keys[:, row, :, :, :length].clone(memory_format=torch.contiguous_format),
            self.values[:, row, :, :length].clone(memory_format=torch.contiguous_format),
        )

    def load(self, row: int, prefix: KVPrefix, length: int) -> None:
        self.keys[:, row, :, :, :length] = prefix.keys[..., :length]
        self.values[:, row, :, :length] = prefix.values[:, :, :length]

    def erase(self, row: int) -> None:
        """Overwrites a row with non-finite numbers: even masked, they would spoil a later request."""
        self.keys[:, row] = 0
        self.values[:, row] = 0


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
