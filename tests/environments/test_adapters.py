"""What the adapters do themselves, with stand-ins for the packages: the real ones play in ``test_third_party.py``."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from environments.adapters import mcp, reasoning_gym
from gspo_core.env import InvalidEnvironment, load_environment
from gspo_core.env.loading import UnreachableEnvironment
from gspo_core.json_value import JSON
from gspo_core.types import Split

# reasoning-gym


class Sums:
    """A data set that is seeded as those of reasoning-gym are: item i by the seed + i."""

    def __init__(self, name: str, seed: int, size: int) -> None:
        self._name, self._seed = name, seed

    def __getitem__(self, index: int) -> dict[str, str]:
        chance = random.Random(self._seed + index)
        return {"question": f"{self._name}: {chance.getrandbits(60)} + {chance.getrandbits(60)}"}


class Composite:
    """Its parts are seeded by their place, unless their configuration has a seed."""

    def __init__(self, seed: int, size: int, datasets: Sequence[SimpleNamespace]) -> None:
        self._seed = seed
        self._parts = [
            Sums(spec.name, **{"seed": seed + place + 1, "size": size, **spec.config})
            for place, spec in enumerate(datasets)
        ]

    def __getitem__(self, index: int) -> dict[str, str]:
        return random.Random(self._seed + index).choice(self._parts)[index]


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def create_dataset(name: str, **given: Any) -> Sums | Composite:
        return Composite(**given) if name == "composite" else Sums(name, **given)

    package, composite = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.composite")
    vars(package).update(create_dataset=create_dataset, composite=composite)
    vars(composite).update(DatasetSpec=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.composite", composite)
    reasoning_gym._dataset.cache_clear()
    yield
    reasoning_gym._dataset.cache_clear()


def questions(world: reasoning_gym.ReasoningGym) -> tuple[list[str], list[str]]:
    """The trained ones, and those held out."""
    trained = [world.reset(**world.tasks(index)) for index in range(world.num_tasks)]  # type: ignore[arg-type]
    return trained, [world.reset(**world.eval_tasks(index)) for index in range(world.num_eval_tasks)]  # type: ignore[arg-type]


MIXED = {"datasets": [{"name": "a"}, {"name": "b", "config": {"seed": -7}}, {"name": "c", "config": {"seed": 3}}]}


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("eval_seed", [20, 1_000])
@pytest.mark.parametrize("seed", [0, 5, -30, -10])
@pytest.mark.parametrize(("name", "options"), [("sums", {}), ("composite", MIXED)])
def test_no_held_out_item_of_reasoning_gym_is_a_trained_one(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], seed: int, eval_seed: int
) -> None:
    monkeypatch.setattr(reasoning_gym, "EVAL_SEED", eval_seed)
    world = reasoning_gym.ReasoningGym(name, num_tasks=50, num_eval_tasks=40, seed=seed, options=options)
    trained, held_out = questions(world)
    assert len(set(held_out)) == 40
    assert not set(trained) & set(held_out)


@pytest.mark.usefixtures("_package")
def test_held_out_items_of_reasoning_gym_stay_when_more_are_trained() -> None:
    few, many = (reasoning_gym.ReasoningGym("sums", num_tasks=size) for size in (10, 5_000))
    assert questions(few)[1] == questions(many)[1]


# MCP


def tasks_of(monkeypatch: pytest.MonkeyPatch, file: Path) -> list[Any]:
    """Those that are trained, without a server."""
    monkeypatch.setattr(mcp, "RemoteEnvironment", lambda name, connect, all_tasks, *rest: all_tasks)
    found: Any = mcp.Mcp.as_environment("shop", reward="json:loads", tasks=str(file), command=["a-server"])
    return list(found[Split.TRAIN])


def test_tasks_of_mcp_are_the_lines_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "one\u2028two\u2029three\x85four"}\n\n{"prompt": "five"}\n\n', encoding="utf-8")
    assert tasks_of(monkeypatch, file) == [{"prompt": "one\u2028two\u2029three\x85four"}, {"prompt": "five"}]


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (b'{"prompt": "a"}\n\n{"prompt"', r"tasks\.jsonl:3 is not JSON: Expecting ':'"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', r"tasks\.jsonl:2: every task has a prompt, \{'text': 'b'\} has none"),
        (b"[1]", r"tasks\.jsonl:1: every task has a prompt, \[1\] has none"),
        (b'{"prompt": "\xff"}', r"cannot read .*tasks\.jsonl: 'utf-8' codec can't decode"),
        (None, r"cannot read .*tasks\.jsonl: .*No such file"),
    ],
)
def test_a_mistake_in_the_tasks_of_mcp_is_its_authors_and_is_named(
    tmp_path: Path, written: bytes | None, complaint: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    if written is not None:
        file.write_bytes(written)
    config: dict[str, JSON] = {"reward": "json:loads", "tasks": str(file), "command": ["a-server"]}
    with pytest.raises(InvalidEnvironment, match=complaint) as caught:
        load_environment("environments.adapters.mcp:Mcp", config)
    assert not isinstance(caught.value, UnreachableEnvironment)
