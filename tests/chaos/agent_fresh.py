"""An agent that is a function, in a host of the gateway: who dies begins another run."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from tests.chaos.adder import Adder, make_client
from tests.chaos.players import FRESH, tasks_of

tasks, eval_tasks = tasks_of(FRESH)
client = make_client()


def run(task: dict[str, int], llm: Any, ledger: str) -> float:
    own = client.with_options(base_url=llm.base_url, api_key=llm.api_key)
    return Adder(own, uuid.uuid4().hex[:6], Path(ledger)).play(task["number"])
