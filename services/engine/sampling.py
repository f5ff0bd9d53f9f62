"""Drawing tokens from the whole distribution at a temperature, reproducibly for each request.

Rule: the number behind a token is a function of its request's seed and of the number of ids before it alone, so neither
the other requests of a batch, nor a pause, nor a retraction changes what a request samples, nor whether an answer is
asked for at once or in pieces. The log-prob is always that of softmax(logits / temperature) in float32. No top-k, top-p
or penalties: a trainer could not reproduce those.

Shapes by suffix: B requests; behind it, for logits and what comes of them, the vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The mixing constants of the SplitMix64 generator (Steele, Lea, Flood 2014).
_GAMMA, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S30, _S27, _S31, _S11 = (np.uint64(s) for s in (30, 27, 31, 11))


def request_seed(engine_seed: int, rid: str) -> int:
    digest = hashlib.blake2b(f"{engine_seed}/{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In [0, 1): one number for each pair of seed and position."""
    z = seeds_B + (positions_B + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    z ^= z >> _S31
    uniforms_B: NDArray[np.float64] = (z >> _S11) * 2.0**-53
    return uniforms_B


def sample(logits_B: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids, float32 log-probs). Temperature 0 takes the best token and reports its log-prob at temperature 1."""
    greedy_B = temperatures_B == 0
    any_greedy = bool(greedy_B.any())
    divisor_B = temperatures_B.masked_fill(greedy_B, 1.0) if any_greedy else temperatures_B
    logprobs_B = torch.log_softmax(logits_B.float() / divisor_B[:, None], dim=-1)
    cumulative_B = logprobs_B.double().exp_().cumsum_(-1)
    targets_B = uniforms_B * cumulative_B[:, -1]
    ids_B = torch.searchsorted(cumulative_B, targets_B[:, None], right=True).squeeze(1)
    ids_B.clamp_(max=logits_B.shape[1] - 1)
    if any_greedy:
        ids_B = torch.where(greedy_B, logits_B.argmax(-1), ids_B)
    return ids_B, logprobs_B.gather(1, ids_B[:, None]).squeeze(1)
