"""Causal attention over sequences that lie end to end, registered with transformers as `gspo_packed`.

One rule: no token sees another sequence. On a GPU torch's variable-length kernel does the work where it applies;
elsewhere each sequence goes through scaled-dot-product attention by itself. What a model asks for beyond causal and
sliding-window attention is refused, never ignored. It makes no masks: packed sequences need none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "gspo_packed"
# Arguments that models pass along and that do not change plain causal attention.
_HARMLESS = frozenset({"position_ids", "output_attentions", "use_cache", "cache_position", "is_causal"})


class UnsupportedAttention(NotImplementedError):
    """The model's attention is more than causal attention within a window."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, N, width) queries, each with the keys before it in its own sequence."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown or dropout or attention_mask is not None:
        what = unknown or (["dropout"] if dropout else ["attention_mask"])
        raise UnsupportedAttention(
            f"{type(module).__name__} passes {', '.join(what)}, which packed attention cannot honour: "
            "set layout to padded"
        )
    window = sliding_window if sliding_window and sliding_window < max(packed_lengths) else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, packed_lengths, scaling, window), None
    sizes = list(packed_lengths)
    queries, keys, values = (torch.split(x, sizes, dim=2) for x in (query, key, value))
    outputs = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if window is None else _window_mask(q.shape[2], window, query.device),
            is_causal=window is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor((0, *lengths), device=query.device).cumsum(0, dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(lengths)
    output = varlen_attn(
        *(q, k, v, ends, ends, longest, longest),
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(PACKED, packed_attention)
