"""Log-probs of chosen tokens from hidden states, without the matrix of tokens times vocabulary.

One rule: the head's output exists for only one chunk of rows at a time, in the forward pass and in the backward pass
(which recomputes it), and everything from the logits on is float32 or wider. It runs no model.

Shape suffixes: N scored tokens (inside the loops those of one chunk), V vocabulary. `hidden` is N by width, `head` V by
width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


def chosen_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
) -> Tensor:
    """log softmax((hidden @ head + bias) / temperature) at the target, one per row; float32 (float64 stays).

    Differentiable in hidden states, head and bias. The product is formed in the dtype of the hidden states.
    """
    apply: Any = _ChosenLogprobs.apply
    result: Tensor = apply(hidden, head, bias, targets_N, temperatures_N, chunk_tokens)
    return result


class _Context(Protocol):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    chunk_tokens: int

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        temperatures_N: Tensor,
        chunk_tokens: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        matrix = head.to(hidden.dtype)
        logprobs_N = hidden.new_empty(len(hidden), dtype=wide)
        normalizers_N = torch.empty_like(logprobs_N)
        for rows in _chunks(len(hidden), chunk_tokens):
            logits_NV = _logits(hidden[rows], matrix, bias, temperatures_N[rows], wide)
            normalizers_N[rows] = torch.logsumexp(logits_NV, -1)
            logprobs_N[rows] = logits_NV.gather(-1, targets_N[rows, None]).squeeze(-1) - normalizers_N[rows]
            del logits_NV  # before the next chunk is made
        ctx.save_for_backward(hidden, head, bias, targets_N, temperatures_N, normalizers_N)
        ctx.chunk_tokens = chunk_tokens
        return logprobs_N

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        hidden, head, bias, targets_N, temperatures_N, normalizers_N = ctx.saved_tensors
        wide, narrow = normalizers_N.dtype, hidden.dtype
        matrix = head.to(narrow)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            # d logprob / d logits = onehot - softmax
            scaled = (grad_N[rows] / temperatures_N[rows].to(wide))[:, None]
            grad_NV = _logits(hidden[rows], matrix, bias, temperatures_N[rows], wide)
            grad_NV.sub_(normalizers_N[rows, None]).exp_().mul_(-scaled)
            grad_NV.scatter_add_(-1, targets_N[rows, None], scaled)
            if grad_bias is not None:
                grad_bias += grad_NV.sum(0)
            grad_NV = grad_NV.to(narrow)
            if grad_hidden is not None:
                torch.mm(grad_NV, matrix, out=grad_hidden[rows])
            if grad_head is not None:
                if narrow == wide:
                    grad_head.addmm_(grad_NV.t(), hidden[rows])
                else:
                    grad_head += grad_NV.t() @ hidden[rows]
            del grad_NV
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(head.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *(None, None, None),
        )


def _chunks(num_rows: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_rows)) for start in range(0, num_rows, chunk_tokens)]


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, temperatures_N: Tensor, wide: torch.dtype) -> Tensor:
    """(C, V) in the wide type, in fresh memory that callers may overwrite."""
    if hidden.is_cuda and hidden.dtype != wide:
        # keeps the accumulator's precision instead of rounding logits to 8 bits
        logits_NV = torch.mm(hidden, matrix.t(), out_dtype=wide)
    else:
        logits_NV = torch.mm(hidden.to(wide), matrix.to(wide).t())
    if bias is not None:
        logits_NV += bias.to(wide)
    return logits_NV.div_(temperatures_N.to(wide)[:, None])
