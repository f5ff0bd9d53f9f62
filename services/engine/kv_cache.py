"""Keys and values of the running requests: one row each, rows 0..n-1 without holes, so that a decode step reads views.

Rule: a row belongs to one running request; beyond its length lies garbage, but finite. All rows have one capacity. Rows
and capacity are powers of two, and both follow what is needed whenever one of them has to grow. The scheduler knows
which tokens a row holds, and how many bytes there are for them.

Keys are stored transposed (head dimension before tokens): the score product then reads memory in order, which halved
its time on a CPU.

Shapes: keys (layers, rows, heads, head dimension, tokens), values (layers, rows, heads, tokens, head dimension); a
prefix is the same without rows.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FIRST_CAPACITY = 256
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


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

    def size_bytes(self, num_rows: int, length: int) -> int:
        """What room for so many rows of that length takes."""
        return _doubled(1, num_rows) * _doubled(_FIRST_CAPACITY, length) * self.token_bytes

    def reserve(self, num_rows: int, length: int) -> None:
        """Makes room for ``num_rows`` rows of ``length`` tokens: for all that rows hold, as nothing else is kept."""
        layers, rows, heads, head_dim, capacity = self.keys.shape
        if num_rows <= rows and length <= capacity:
            return
        new_rows, new_capacity = _doubled(1, num_rows), _doubled(_FIRST_CAPACITY, length)
        keys = self.keys.new_zeros(layers, new_rows, heads, head_dim, new_capacity)
        values = self.values.new_zeros(layers, new_rows, heads, new_capacity, head_dim)
        rows, capacity = min(rows, new_rows), min(capacity, new_capacity)
        keys[:, :rows, :, :, :capacity] = self.keys[:, :rows, :, :, :capacity]
        values[:, :rows, :, :capacity] = self.values[:, :rows, :, :capacity]
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


def budget_bytes(device: torch.device) -> int:
    """The default room for keys and values: half of a GPU's free memory; on a CPU, a quarter of the machine's memory or
    of its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    allowed = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # ``max``: no limit
            allowed.append(int(path.read_text()))
    return min(allowed) // 4


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
