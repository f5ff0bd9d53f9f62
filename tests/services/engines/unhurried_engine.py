"""The embedded engine, which rests after each step: a busy machine delays who looks at it by less than an answer takes.

Tests of engines act while a request runs. By itself a model of theirs answers 30 tokens in 30 ms, which a test that
shares two cores with others may not see at all. All but the rest is the real thing.
"""

from __future__ import annotations

import asyncio
import sys

from services.engine import __main__ as engine_main
from services.engine.engine import EmbeddedEngine

STEP_S = 0.005


class Unhurried(EmbeddedEngine):
    async def between_steps(self) -> None:
        await asyncio.sleep(STEP_S)
        await super().between_steps()


if __name__ == "__main__":
    engine_main.EmbeddedEngine = Unhurried  # type: ignore[misc]
    sys.exit(engine_main.main())
