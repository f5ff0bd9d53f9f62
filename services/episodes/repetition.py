"""Detects a policy that goes in circles: its last words are one short piece, again and again.

Rule: only exact repetition counts, so that nothing a person would call a text is ever cut off.
"""

from __future__ import annotations

from array import array

# Longer pieces are no stutter: lists and tables repeat lines.
LONGEST_PIECE = 64
# The fewest repeats that count.
FEWEST_REPEATS = 4


def goes_in_circles(sampled: array[int], num_tokens: int) -> bool:
    """Whether the last ``num_tokens`` are repetitions of one piece."""
    if len(sampled) < num_tokens:
        return False
    tail = sampled[-num_tokens:]
    longest = min(LONGEST_PIECE, num_tokens // FEWEST_REPEATS)
    return any(tail[piece:] == tail[:-piece] for piece in range(1, longest + 1))
