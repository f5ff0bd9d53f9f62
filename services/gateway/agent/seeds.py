"""What an agent's seed becomes for an engine: one number for all pieces of a turn, whoever asks for them.

Rule: it is made of the seed and of the ids before the turn's first sampled token alone. So the same request draws the
same numbers in a fresh conversation, at another gateway, after a retry, and behind a switch of weights; and an agent
that sends one seed with everything draws other numbers in every turn and task, instead of the same ones everywhere.
Which tokens those numbers make is the weights' business: log-probs and versions are recorded as for any other turn.
"""

from __future__ import annotations

import hashlib

from services.episodes.tree import TurnTokens
from services.gateway.dialects.turns import TurnRequest


def sampling_seed(ask: TurnRequest, turn: TurnTokens) -> int | None:
    """Below 2**31, which every kind of engine takes. None where the agent sent none."""
    if ask.seed is None:
        return None
    digest = turn.branch.ids.digest(turn.num_prompt)
    text = f"{ask.seed}/{turn.num_prompt}/{digest}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
