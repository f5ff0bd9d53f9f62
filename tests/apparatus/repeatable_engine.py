"""The embedded engine with samples that a second run finds again: `python -m tests.apparatus.repeatable_engine`.

What a request samples follows from its seed, which comes from a name that its sender draws by lot. Here it comes from
what is asked and from how often that was asked since the weights changed. One request runs at a time and no prefix is
kept, so that the last bits of a log-prob do not depend on who asked at the same moment either.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import ClassVar
from unittest.mock import patch

from services.engine import __main__ as engine
from services.engine.protocol import AnswerRenderer, GenerateReader
from services.engine.scheduler import GenerateRequest

ONE_AT_A_TIME = ("--max-concurrency", "1", "--prefix-cache-mib", "0")


class OrderedReader(GenerateReader):
    _asked: ClassVar[Counter[bytes]] = Counter()
    _space: ClassVar[str | None] = None

    def read(self, content: bytes) -> tuple[GenerateRequest, AnswerRenderer]:
        request, renderer = super().read(content)
        if request.cache_space != self._space:  # the label of the weights
            self._asked.clear()
            OrderedReader._space = request.cache_space
        prompt = str(request.prompt).encode()
        self._asked[prompt] += 1
        digest = hashlib.blake2b(prompt + str(self._asked[prompt]).encode(), digest_size=8).digest()
        request.seed = int.from_bytes(digest, "little")
        return request, renderer


if __name__ == "__main__":
    sys.argv += ONE_AT_A_TIME
    with patch.object(engine, "GenerateReader", OrderedReader):
        sys.exit(engine.main())
