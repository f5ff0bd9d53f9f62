"""Causal attention over sequences packed end to end, registered with transformers as `gspo_packed`.

One rule: no token sees another sequence. On a GPU it uses torch's variable-length kernel where possible; otherwise
each piece of the packing goes through scaled-dot-product attention separately. It refuses, rather than ignores,
anything beyond causal and sliding-window attention. It builds no full mask: packings need none.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from gspo_core.batch.packing import Packing
from gspo_core.learner.context import ContextRanks

PACKED = "gspo_packed"
# Arguments that models pass but that do not change plain causal attention.
_HARMLESS = frozenset({"position_ids", "cache_position"})


# Query rows to mask at once where a mask is needed.
MAX_MASK_ROWS = 1024


class UnsupportedAttention(NotImplementedError):
    """The model needs more than causal attention within a window."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    split: ContextRanks | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Tensor | float | str | None,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, tokens, width) queries, each with the keys up to it in its own sequence.

    With `split` the tokens are this rank's part of the packing, and so are those of the result.
    """
    unknown = sorted(name for name, given in others.items() if not _is_off(given) and name not in _HARMLESS)
    if unknown or dropout or attention_mask is not None:
        what = unknown or (["dropout"] if dropout else ["attention_mask"])
        raise UnsupportedAttention(f"{type(module).__name__} passes {', '.join(what)}, which packed attention ignores")
    window = sliding_window if sliding_window and sliding_window < packing.longest else None
    if query.is_cuda or split is not None:
        # under autocast, normed queries are float32 while values are half precision
        query, key = query.to(value.dtype), key.to(value.dtype)
    if split is not None:
        query, key, value = split.all_tokens(query, key, value, packing.num_tokens)
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        output = _by_kernel(query, key, value, packing, scaling, window)
    else:
        output = torch.cat(_by_pieces(query, key, value, packing, scaling, window), dim=2).transpose(1, 2)
    return output if split is None else split.own_tokens(output), None


def _is_off(argument: Tensor | float | str | None) -> bool:
    return argument is None or argument is False


def _by_pieces(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> list[Tensor]:
    """(1, heads, rows, width) of each piece, computed separately.

    Splits tensors once, because the backward pass of each slice would allocate a full-size gradient.
    """
    sizes = [piece.length for piece in packing.pieces]
    starts = [piece.start for piece in packing.pieces]
    queries, keys, values = (dict(zip(starts, torch.split(x, sizes, dim=2), strict=True)) for x in (query, key, value))
    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    results = []
    for piece in packing.pieces:
        seen = [*(start for start, _ in piece.context), piece.start]
        k, v = (_joined([states[start] for start in seen]) for states in (keys, values))
        if window is None and piece.context_length < piece.length:
            # recomputing and dropping the context's rows is cheaper than a mask
            q = _joined([queries[start] for start in seen])
            results.append(attend(q, k, v, is_causal=True)[:, :, piece.context_length :])
            continue
        first = piece.context_length
        for q in torch.split(queries[piece.start], MAX_MASK_ROWS, dim=2):
            end = first + q.shape[2]
            results.append(attend(q, k[:, :, :end], v[:, :, :end], attn_mask=_mask(first, end, window, q)))
            first = end
    return results


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _mask(first: int, end: int, window: int | None, like: Tensor) -> Tensor:
    """Attention mask (0 or -inf) of the rows at positions `first` to `end` over the sequence's tokens up to `end`.

    Shaped (1, 1, rows, end), the only shape that the CPU's fast kernel accepts.
    """
    mask = torch.full((end - first, end), -torch.inf, dtype=like.dtype, device=like.device)
    later = mask.triu(first + 1)
    return (later if window is None else later + mask.tril(first - window))[None, None]


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """torch's variable-length kernel; it aligns the ends of queries and keys, as shared contexts require."""
    from torch.nn.attention.varlen import varlen_attn

    index = packing.on_device(query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if index.key_index is not None:
        k, v = k.index_select(0, index.key_index), v.index_select(0, index.key_index)
    # torch 2.11 has no such argument, and hands heads that share keys to the kernel unasked
    can_group = "enable_gqa" in inspect.signature(varlen_attn).parameters
    attend = partial(varlen_attn, enable_gqa=query.shape[1] != key.shape[1]) if can_group else varlen_attn
    output = attend(
        *(q, k, v, index.query_ends, index.key_ends, index.longest_query, index.longest_key),
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED, packed_attention)
