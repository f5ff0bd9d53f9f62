"""An agent that is a function, in a host of the gateway: who dies begins the same run again, and is told the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.adder import Adder, make_client, run_of
from tests.chaos.players import REPLAYED, tasks_of

tasks, eval_tasks = tasks_of(REPLAYED)
replayable = True
client = make_client()


def run(task: dict[str, int], llm: Any, ledger: str) -> float:
    own = client.with_options(base_url=llm.base_url, api_key=llm.api_key)
    return Adder(own, run_of(llm.episode), Path(ledger), may_repeat=True).play(task["number"])
