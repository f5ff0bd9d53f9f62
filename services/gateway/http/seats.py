"""How many requests may be open at once: of one key, and of all.

Rule: a request too many is refused before its body is read. An agent has a few turns under way at once; a loop that
does not wait for its answers must not take what other episodes need. Keys are held as digests while they ask.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator

from services.gateway.dialects.turns import Refusal, RefusalKind

# Agents that start agents of their own share the key of their episode.
MAX_OPEN_OF_ONE = 64
# Each holds its history in memory, megabytes at times.
MAX_OPEN = 2048


class Seats:
    def __init__(self, most: int = MAX_OPEN, most_of_one: int = MAX_OPEN_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[bytes] = Counter()
        self._num_open = 0

    @contextlib.contextmanager
    def taken(self, key: str) -> Iterator[None]:
        """Raises ``Refusal``."""
        name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:16]
        if self._open[name] >= self._most_of_one:
            message = f"{self._most_of_one} requests with this key wait for their answers, as many as may; wait for one"
            raise Refusal(RefusalKind.TOO_MANY, message)
        if self._num_open >= self._most:
            raise Refusal(RefusalKind.AWAY, "too many requests are open at this gateway; ask again")
        self._open[name] += 1
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]
