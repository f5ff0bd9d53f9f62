"""What the scripted engine says, and how probable that was: a fixed function of weights, context and temperature.

Rule: the state behind a token depends on the tokens before it *and on the weights under which each was read*, as keys
and values do. So a log-prob that was computed on a stale prefix, or under other weights than its label says, differs
from the true one, and a test can see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EMPTY = b""
# Spread of the logits: far from flat, so that a wrong context shows, and no token is out of reach.
_SPREAD = 2.0


def read(state: bytes, token_id: int, weights: str) -> bytes:
    """The state after one more token was read under ``weights``."""
    return hashlib.blake2b(state + token_id.to_bytes(4, "little") + weights.encode(), digest_size=16).digest()


def logprobs(state: bytes, weights: str, temperature: float, vocab_size: int) -> NDArray[np.float64]:
    """Of every token that may follow; temperature 0 stands for 1 here, as in the real server."""
    digest = hashlib.blake2b(state + b"/" + weights.encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    logits = generator.normal(scale=_SPREAD, size=vocab_size) / (temperature or 1.0)
    logits -= logits.max()
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def true_logprobs(
    weights: str, prompt: Sequence[int], output: Sequence[int], temperature: float, vocab_size: int
) -> list[float]:
    """Of each output token when everything is read under ``weights``: what a trainer would compute."""
    state, values = EMPTY, []
    for token_id in prompt:
        state = read(state, token_id, weights)
    for token_id in output:
        values.append(float(logprobs(state, weights, temperature, vocab_size)[token_id]))
        state = read(state, token_id, weights)
    return values
