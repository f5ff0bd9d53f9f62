"""One row of tokens over several ranks: each computes its part of the row, and attention all tokens of some heads.

One rule: a split row computes what a whole one does. Where a layer needs other tokens (attention), the ranks exchange
heads for tokens and back (one all-to-all each way, after Ulysses); everything else is done for each token apart.
All ranks of a group get the same micro-batches and make the same calls in the same order.

Shape suffixes: T tokens of the row, P tokens of one rank's part of it (as many on every rank: the end is padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


class UnsupportedSplit(ValueError):
    """The model cannot be computed on that many ranks together."""


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share each row of tokens."""

    group: dist.ProcessGroup
    place: int
    """This rank's place among them, and that of its part in the row."""
    size: int

    def part_size(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def part(self, row_T: Tensor) -> Tensor:
        """(1, P) of (1, T), padded with 0. A padded token is no key of any other, so what it holds changes nothing."""
        size = self.part_size(row_T.shape[1])
        padded = F.pad(row_T, (0, size * self.size - row_T.shape[1]))
        return padded[:, self.place * size : (self.place + 1) * size]

    def own_rows(self, rows: NDArray[np.int64], num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of `rows` of the whole row are in this rank's part, and where in it they are."""
        size = self.part_size(num_tokens)
        own = np.flatnonzero(rows // size == self.place)
        return own, rows[own] - self.place * size

    def joined(self, own_values: Tensor, own: Tensor, number: int) -> Tensor:
        """(number,) values, of which each rank has its `own`; every rank gets all of them."""
        apply: Any = _Joined.apply
        values: Tensor = apply(own_values, own, number, self.group)
        return values

    def all_tokens(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """(1, heads / size, T, width) of each (1, heads, P, width): of fewer heads all tokens, in one exchange.

        Where there are fewer heads of keys than ranks, ranks get copies of the same one; their gradients add up.
        """
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise UnsupportedSplit(
                f"learner.context_parallel: {self.size} ranks cannot share {heads} heads of attention; "
                f"take a divisor of {heads}"
            )
        copies = int(np.lcm(key_heads, self.size)) // key_heads
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        states = [x[0].reshape(self.size, -1, *x.shape[2:]) for x in (query, key, value)]
        exchanged = self._exchange(torch.cat(states, dim=1))  # ranks, heads of all three, P, width
        whole = exchanged.transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]
        q, k, v = torch.split(whole, [x.shape[1] for x in states], dim=1)
        return q, k, v

    def own_tokens(self, output: Tensor) -> Tensor:
        """(1, P, heads, width) of (1, T, heads / size, width): the inverse, for what attention returns."""
        num_tokens = output.shape[1]
        size = self.part_size(num_tokens)
        padded = F.pad(output[0], (0, 0, 0, 0, 0, size * self.size - num_tokens))
        exchanged = self._exchange(padded.reshape(self.size, size, *padded.shape[1:]))  # ranks, P, heads / size, width
        return exchanged.transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send the part at place i to rank i; returns those that came, in the order of ranks."""
        apply: Any = _Exchange.apply
        received: Tensor = apply(parts, self.group)
        return received


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; it is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _Joined(torch.autograd.Function):
    """Values of all ranks in one vector. Each rank computes the same loss of it, so the gradient of a value is what its
    own rank found: adding those of all ranks would count the loss as often as there are ranks."""

    @staticmethod
    def forward(ctx: Any, own_values: Tensor, own: Tensor, number: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        ctx.group = group
        values = own_values.new_zeros(number).index_copy(0, own, own_values)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return grads[0].index_select(0, own), None, None, None
