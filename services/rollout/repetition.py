"""Whether a policy goes round in circles: what it said last is one short piece again and again.

Rule: only exact repetition counts, so that nothing a person would call a text is ever cut off.
"""

from __future__ import annotations

from array import array

# A longer piece is no stutter: lists and tables repeat lines.
LONGEST_PIECE = 64
# A run must hold its piece so many times at least.
FEWEST_REPEATS = 4


def goes_in_circles(sampled: array[int], num_tokens: int) -> bool:
    """Whether the last ``num_tokens`` are repetitions of one piece."""
    if len(sampled) < num_tokens:
        return False
    tail = sampled[-num_tokens:]
    longest = min(LONGEST_PIECE, num_tokens // FEWEST_REPEATS)
    return any(tail[piece:] == tail[:-piece] for piece in range(1, longest + 1))
