"""The attention of packings: what is refused, and the path for GPUs with torch's kernel written out by hand.

The kernel itself needs a GPU. What is ours about it - where keys are gathered from, cumulative lengths, windows - is
checked here against the path for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from gspo_core.batch.packing import Packing, pack
from gspo_core.learner.attention import MAX_MASK_ROWS, UnsupportedAttention, _by_kernel, packed_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def slow_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """The documented meaning of `varlen_attn`: sequence by sequence, the ends of queries and keys aligned."""
    assert longest_query == int(query_ends.diff().max())
    assert longest_key == int(key_ends.diff().max())
    assert enable_gqa
    back, ahead = window_size
    assert ahead == 0
    outputs = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]]
        k, v = (x[key_ends[i] : key_ends[i + 1]].repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | (distance > back if back >= 0 else False)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def older_varlen(*given: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """As torch 2.11 has it."""
    return slow_varlen(*given, scale=scale, window_size=window_size, enable_gqa=True)


def states(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, num_tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def tree(share: bool) -> Packing:
    rng = np.random.default_rng(0)
    preamble = rng.integers(0, 9, 20)
    prompts = [np.concatenate([preamble, rng.integers(0, 9, 17)]) for _ in range(3)]
    return pack([np.concatenate([prompts[i % 3], rng.integers(0, 9, 3 + 11 * i)]) for i in range(7)], share=share)


@pytest.mark.parametrize("kernel", [slow_varlen, older_varlen])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("share", [False, True])
def test_the_path_for_gpus_gathers_what_the_path_for_cpus_sees(
    monkeypatch: pytest.MonkeyPatch, share: bool, window: int | None, kernel: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    packing = tree(share)
    assert any(len(piece.context) > 1 for piece in packing.pieces) == share
    query, key, value = states(packing.num_tokens)
    by_kernel = _by_kernel(query, key, value, packing, 0.3, window)
    by_pieces, _ = packed_attention(
        nn.Identity(), query, key, value, None, packing=packing, scaling=0.3, sliding_window=window
    )
    torch.testing.assert_close(by_kernel, by_pieces, rtol=1e-5, atol=1e-5)


def test_long_pieces_are_masked_in_blocks() -> None:
    """A context longer than the piece takes the path with masks, whose blocks must fit together."""
    length = MAX_MASK_ROWS + 50
    ids = np.zeros(2 * length + 30, np.int64)
    other = ids.copy()
    other[length + 30 :] = 1
    packing = pack([ids, other], share=True)
    assert [piece.length for piece in packing.pieces] == [length + 30, length, length]
    query, key, value = states(packing.num_tokens)
    ours, _ = packed_attention(nn.Identity(), query, key, value, None, packing=packing)
    rows = torch.from_numpy(packing.rows[1])
    alone = torch.nn.functional.scaled_dot_product_attention(
        *(x[:, :, rows] for x in (query, key, value)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours[0, rows], alone[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"softcap": 30.0}, "softcap"), ({"s_aux": torch.zeros(4)}, "s_aux"), ({"dropout": 0.1}, "dropout")],
)
def test_what_is_more_than_causal_attention_is_refused(given: dict[str, Any], named: str) -> None:
    packing = pack([np.zeros(3, np.int64)], share=True)
    with pytest.raises(UnsupportedAttention, match=named):
        packed_attention(nn.Identity(), *states(3), None, packing=packing, **given)
