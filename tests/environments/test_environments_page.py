"""The example of the page is a complete environment."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import partial
from pathlib import Path

import yaml

from gspo_core.env import RESERVED_NAMES, CallStatus, ParsedTurn, ToolCall, load_environment
from gspo_core.types import Split, StopReason

PAGE = (Path(__file__).parents[2] / "environments" / "README.md").read_text()


async def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "counter.py").write_text(source)
    environment = load_environment(f"{tmp_path / 'counter.py'}:Counter")
    assert [environment.num_tasks(split) for split in Split] == [9, 3]
    session = environment.session()
    start = await session.start(await environment.task(Split.EVAL, 0), 0)
    assert [message["role"] for message in start.messages] == ["system", "user"]
    calls = [ToolCall("add", {"amount": amount}, CallStatus.OK, "", 0, 1) for amount in (9, 5, 5, 2)]
    observation = await session.act(ParsedTurn("", tuple(calls)))
    answers = [message["content"] for message in observation.messages]
    assert answers == ["error: ValueError: amount must be 1..5", "5", "10", "12"]
    assert (await session.act(ParsedTurn("done"))).stop_reason is StopReason.COMPLETED
    assert await session.score() == (1.0, {})
    await session.close()


def test_the_configurations_of_the_page_fit_the_adapters() -> None:
    rows = re.findall(r"^\| `(adapters\.\w+):(\w+)` \|.*\| `(\{.*?\})`", PAGE, re.MULTILINE)
    assert len(rows) == len(list((Path(__file__).parents[2] / "environments" / "adapters").glob("[a-z]*.py"))) - 1
    for module, name, config in rows:
        adapter = getattr(importlib.import_module(f"environments.{module}"), name)
        made_by = partial(adapter.as_environment, name) if hasattr(adapter, "as_environment") else adapter
        inspect.signature(made_by).bind(**yaml.safe_load(config))


def test_every_reserved_name_is_explained() -> None:
    assert [name for name in sorted(RESERVED_NAMES) if f"`{name}" not in PAGE] == []
