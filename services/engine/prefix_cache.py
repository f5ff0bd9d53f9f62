"""Finds prefixes of prompts whose keys and values exist already, in running or in finished requests.

Rule: an entry serves only requests of its own name space, and only while its tokens were computed under the present
weights; the scheduler drops all others. The longest common prefix counts, token by token, so the members of a group
share a prompt and a turn continues the turn before. Finished entries are evicted, the least recently used first, when
they exceed a budget of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.engine.kv_cache import KVPrefix

# Below this, copying costs as much as computing.
_MIN_MATCH = 8
_NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """The first ``length`` tokens of slot ``slot``; in row ``row`` of the cache while it runs, later in ``kv``."""

    slot: int
    length: int
    row: int
    kv: KVPrefix | None = None


class PrefixCache:
    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._finished: OrderedDict[int, CachedPrefix] = OrderedDict()
        self._entries: list[CachedPrefix | None] = []
        self._free: list[int] = []
        self._tokens = np.full((16, 256), _NO_TOKEN, dtype=np.int32)
        self._spaces = np.full(16, -1, dtype=np.int64)
        self._ready = np.zeros(16, dtype=np.bool_)
        self._space_ids: dict[str | None, int] = {}

    def match(self, tokens: NDArray[np.int32], space: str | None) -> tuple[CachedPrefix | None, int, int]:
        """(entry, its common tokens, common tokens of an entry that is being computed right now).

        At most all tokens but the last are matched: the last one has to be computed to predict the next.
        """
        num, width = len(self._entries), min(len(tokens) - 1, self._tokens.shape[1])
        if not num or width < _MIN_MATCH:
            return None, 0, 0
        differs = self._tokens[:num, :width] != tokens[:width]
        first = differs.argmax(axis=1)
        first[~differs[np.arange(num), first]] = width
        first[self._spaces[:num] != self._space_ids.get(space, -2)] = 0
        ready = self._ready[:num]
        pending = int(np.where(ready, 0, first).max())
        common = np.where(ready, first, 0)
        best = int(common.argmax())
        entry, length = self._entries[best], int(common[best])
        if entry is None or length < _MIN_MATCH:
            return None, 0, pending
        if entry.kv is not None:
            self._finished.move_to_end(entry.slot)
        return entry, length, pending

    def start(self, tokens: NDArray[np.int32], space: str | None, row: int) -> CachedPrefix:
        """An entry for a request whose tokens are being computed, until ``ready`` is called."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._entries)
            self._entries.append(None)
        self._reserve(slot + 1, len(tokens))
        self._tokens[slot] = _NO_TOKEN
        self._tokens[slot, : len(tokens)] = tokens
        self._spaces[slot] = self._space_ids.setdefault(space, len(self._space_ids))
        self._ready[slot] = False
        entry = self._entries[slot] = CachedPrefix(slot, len(tokens), row)
        return entry

    def ready(self, entry: CachedPrefix) -> None:
        self._ready[entry.slot] = True

    def finish(self, entry: CachedPrefix, tokens: NDArray[np.int32], kv: KVPrefix) -> None:
        """The request of ``entry`` has ended; ``kv`` holds all of ``tokens``."""
        self._reserve(entry.slot + 1, len(tokens))
        self._tokens[entry.slot, : len(tokens)] = tokens
        entry.kv, entry.length = kv, len(tokens)
        self._finished[entry.slot] = entry
        self._used_bytes += kv.size_bytes
        while self._used_bytes > self._budget_bytes:
            self.drop(next(iter(self._finished.values())))

    def drop(self, entry: CachedPrefix) -> None:
        if self._entries[entry.slot] is not entry:
            return
        self._entries[entry.slot] = None
        self._free.append(entry.slot)
        self._spaces[entry.slot] = -1
        self._ready[entry.slot] = False
        if entry.kv is not None:
            del self._finished[entry.slot]
            self._used_bytes -= entry.kv.size_bytes

    def clear(self) -> None:
        for entry in [entry for entry in self._entries if entry is not None]:
            self.drop(entry)
        self._entries.clear()
        self._free.clear()
        self._space_ids.clear()

    def _reserve(self, num_slots: int, width: int) -> None:
        rows, columns = self._tokens.shape
        if num_slots <= rows and width <= columns:
            return
        more_rows, more_columns = max(rows, 2 * rows * (num_slots > rows)), columns
        while more_columns < width:
            more_columns *= 2
        tokens = np.full((more_rows, more_columns), _NO_TOKEN, dtype=np.int32)
        tokens[:rows, :columns] = self._tokens
        self._tokens = tokens
        self._spaces = np.append(self._spaces, np.full(more_rows - rows, -1, dtype=np.int64))
        self._ready = np.append(self._ready, np.zeros(more_rows - rows, dtype=np.bool_))
