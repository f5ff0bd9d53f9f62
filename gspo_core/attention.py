"""Causal attention over sequences that lie end to end, registered with transformers as `gspo_packed`.

One rule: no token sees another sequence. On a GPU torch's variable-length kernel does the work where it applies;
elsewhere each piece of the packing goes through scaled-dot-product attention by itself. What a model asks for beyond
causal and sliding-window attention is refused, never ignored. It makes no masks of the whole: packings need none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from gspo_core.packing import Packing, Piece

PACKED = "gspo_packed"
# Arguments that models pass along and that do not change plain causal attention.
_HARMLESS = frozenset({"position_ids", "cache_position"})


# Rows of queries that are masked at once where a mask is needed.
MAX_MASK_ROWS = 1024


class UnsupportedAttention(NotImplementedError):
    """The model's attention is more than causal attention within a window."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, tokens, width) queries, each with the keys up to it in its own sequence."""
    unknown = sorted(name for name, given in others.items() if not _is_off(given) and name not in _HARMLESS)
    if unknown or dropout or attention_mask is not None:
        what = unknown or (["dropout"] if dropout else ["attention_mask"])
        raise UnsupportedAttention(
            f"{type(module).__name__} passes {', '.join(what)}, which packed attention cannot honour: "
            "set layout to padded"
        )
    window = sliding_window if sliding_window and sliding_window < packing.longest else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _by_kernel(query, key, value, packing, scaling, window), None
    blocks = [
        _block(query, key, value, piece, start, scaling, window)
        for piece in packing.pieces
        for start in range(0, piece.length, _block_rows(piece, window))
    ]
    return torch.cat(blocks, dim=1), None


def _is_off(argument: Any) -> bool:
    return argument is None or argument is False


def _block_rows(piece: Piece, window: int | None) -> int:
    """Plain causal attention needs no mask in memory; with one, rows are taken in blocks to bound it."""
    return piece.length if window is None and not piece.context else MAX_MASK_ROWS


def _block(
    query: Tensor, key: Tensor, value: Tensor, piece: Piece, start: int, scaling: float | None, window: int | None
) -> Tensor:
    """(1, rows, heads, width): what the rows of a piece from `start` on see."""
    end = min(start + _block_rows(piece, window), piece.length)
    spans = (*piece.context, (piece.start, end))
    keys, values = (_gather(x, spans) for x in (key, value))
    causal = window is None and not piece.context
    mask = None if causal else _mask(piece.context_length + start, piece.context_length + end, window, query.device)
    output = F.scaled_dot_product_attention(
        query[:, :, piece.start + start : piece.start + end],
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def _gather(states: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [states[:, :, start : start + length] for start, length in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _mask(first: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """What the rows at positions `first` to `end` of a sequence see of its tokens up to `end`."""
    distance = torch.arange(first, end, device=device)[:, None] - torch.arange(end, device=device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """torch's kernel for several lengths; it aligns the ends of queries and keys, as a shared context needs."""
    from torch.nn.attention.varlen import varlen_attn

    index = packing.on_device(query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if index.key_index is not None:
        k, v = k.index_select(0, index.key_index), v.index_select(0, index.key_index)
    output = varlen_attn(
        *(q, k, v, index.query_ends, index.key_ends, index.longest_query, index.longest_key),
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED, packed_attention)
