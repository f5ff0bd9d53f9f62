"""``python -m tests.chaos.agent_service --port N --journal FILE``: the agents behind a URL, who outlive gateways.

The rule kept here: a start that comes again is the same start. How each began and ended is written down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from examples.agent.service import Episodes, serve
from tests.chaos.adder import Adder, make_client

# Each episode waits in a thread of its own: none may wait for another's end.
MOST_AT_ONCE = 256


class Adders(Episodes):
    def __init__(self, journal: Path) -> None:
        super().__init__()
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE)
        self._adding = make_client()

    def note(self, **record: Any) -> None:
        os.write(self._journal, json.dumps(record).encode() + b"\n")

    async def end_of(self, name: str, start: dict[str, Any]) -> str:
        self.note(event="asked to start", episode=name)
        return await super().end_of(name, start)

    async def play(self, start: dict[str, Any]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._add_up, start)

    def _add_up(self, start: dict[str, Any]) -> str:
        client = self._adding.with_options(base_url=start["base_url"], api_key=start["api_key"])
        run, episode, task = uuid.uuid4().hex[:6], start["episode"], start["task"]
        self.note(event="began", episode=episode, run=run)
        try:
            Adder(client, run, Path(task["ledger"]), self.note, pays=True).play(task["number"])
        except openai.ConflictError:  # another attempt, or nobody, plays this episode now
            self.note(event="was over", episode=episode, run=run)
            raise
        except BaseException as error:
            self.note(event="failed", episode=episode, run=run, why=f"{type(error).__name__}: {error}")
            raise
        self.note(event="ended", episode=episode, run=run)
        return ""


class Retries(logging.Handler):
    """Those that the package makes by itself: it tells its log alone."""

    def __init__(self, adders: Adders) -> None:
        super().__init__(logging.INFO)
        self._adders = adders

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Retrying request"):
            self._adders.note(event="retried")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    adders = Adders(given.journal)
    logger = logging.getLogger("openai._base_client")
    logger.setLevel(logging.INFO)
    logger.addHandler(Retries(adders))
    logger.propagate = False
    serve(adders, given.port, handle_signals=False)


if __name__ == "__main__":
    main()
