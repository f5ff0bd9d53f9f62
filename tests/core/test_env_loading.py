"""Import strings, configuration and tasks: what can be used as an environment, and what is refused with which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import EnvironmentFailed, InvalidEnvironment, PlainEnvironment, load_environment
from gspo_core.types import Split

SHOP = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Shop:
    size: int = 3
    tasks = [{"item": "a"}, {"item": "b"}]
    eval_tasks = [{"item": "c"}]

    def reset(self, item: str) -> str:
        return f"{item} of {self.size}"

    def buy(self, item: str, count: int = 1) -> str:
        """Buy it."""
        return item

    def get_reward(self) -> float:
        return 0.0

    class Inner:
        def reset(self): ...
        def get_reward(self): ...

def make(size=5):
    return Shop(size)

def refuse():
    raise OSError("no disk")

async def rollout(task, llm): ...

number = 7
'''


@pytest.fixture
def shop(tmp_path: Path) -> str:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return str(path)


async def first_prompt(ref: str, config: dict[str, Any]) -> Any:
    environment = load_environment(ref, config)
    session = environment.session()
    start = await session.start(await environment.task(Split.TRAIN, 0), 0)
    await session.close()
    return start.messages[-1]["content"]


async def test_a_class_in_a_file_with_its_configuration(shop: str) -> None:
    assert await first_prompt(f"{shop}:Shop", {"size": 7}) == "a of 7"
    assert await first_prompt(f"{shop}:make", {}) == "a of 5"


async def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is called, and wherever the process stands."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "some_neighbour.py").write_text("SIZE = 9\n")
    (folder / "another_neighbour.py").write_text("NAME = 'late'\n")
    source = SHOP.replace("size: int = 3", "size: int = SIZE").replace(
        "from dataclasses", "from some_neighbour import SIZE\nfrom dataclasses"
    )
    late = '        from another_neighbour import NAME\n        return f"{item} {NAME} of {self.size}"'
    (folder / "shop.py").write_text(source.replace('        return f"{item} of {self.size}"', late))
    monkeypatch.chdir(tmp_path)
    assert await first_prompt("elsewhere/shop.py:Shop", {}) == "a late of 9"


async def test_a_class_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "worlds.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    assert await first_prompt("some_shop.worlds:Shop", {}) == "a of 3"
    assert load_environment("some_shop.worlds:Shop.Inner").num_tasks(Split.TRAIN) == 1
    with pytest.raises(InvalidEnvironment, match=r"no module 'some_shop\.absent'"):
        load_environment("some_shop.absent:Shop")


def test_the_description_is_plain_data(shop: str) -> None:
    description = load_environment(f"{shop}:Shop").describe()
    assert description["num_tasks"] == {"train": 2, "eval": 1}
    assert [tool["function"]["name"] for tool in description["tools"]] == ["buy"]
    assert description["replayable"] is False
    assert description["reward_range"] is None
    assert description["system_prompt"] is None


@pytest.mark.parametrize(
    ("ref", "config", "complaint"),
    [
        ("shop.py", {}, "does not name an environment"),
        (":Shop", {}, "does not name an environment"),
        ("absent_package.worlds:Shop", {}, "no module 'absent_package'"),
        ("absent.py:Shop", {}, "there is no file absent.py"),
        ("{shop}:Stop", {}, "has no 'Stop'; its classes are .'Shop'., its functions are .*'rollout'"),
        ("{shop}:Shop.Outer", {}, "has no 'Shop.Outer'"),
        ("{shop}:number", {}, "is a int, not a class"),
        ("{shop}:rollout", {}, "owns its loop, an agent: write"),
        ("{shop}:Shop", {"colour": 1}, "the config .'colour'. does not fit"),
        ("{shop}:refuse", {}, "creating an instance failed: error: OSError: no disk"),
        ("{shop}:make", {"colour": 1}, "the config .'colour'. does not fit"),
    ],
)
def test_every_mistake_is_told(shop: str, ref: str, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidEnvironment, match=complaint):
        load_environment(ref.replace("{shop}", shop), config)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import absent_dependency", "No module named 'absent_dependency'"),
        ("1 / 0", "ZeroDivisionError"),
        ("class A(:", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_file_that_fails_leaves_nothing_behind(tmp_path: Path, source: str, complaint: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    before = set(sys.modules)
    with pytest.raises(InvalidEnvironment, match=complaint):
        load_environment(f"{path}:A")
    assert not [name for name in set(sys.modules) - before if "broken" in name]


def world(**members: Any) -> type:
    base = {"reset": lambda self: None, "get_reward": lambda self: 0.0}
    return type("World", (), base | members)


def load(cls: Any) -> PlainEnvironment:
    return PlainEnvironment(cls, {}, name="world")


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"reset": None}, r"needs a method reset\(\)"),
        ({"get_reward": None}, r"needs a method get_reward\(\)"),
        ({"tasks": iter([{}])}, "must be a list"),
        ({"tasks": 7}, "must be a list"),
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["a"]}, "each of tasks must be a dict, not a str"),
        ({"eval_tasks": ["a"]}, "each of eval_tasks must be a dict"),
        ({"tasks": staticmethod(lambda index: {})}, "needs num_tasks"),
        ({"reward_range": (1, 0)}, "two finite numbers"),
        ({"reward_range": 1}, "two finite numbers"),
        ({"reward_range": (0, float("inf"))}, "two finite numbers"),
    ],
)
def test_classes_that_cannot_be_used_say_why(members: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidEnvironment, match=complaint):
        load(world(**members))


def test_what_fails_while_it_is_loaded_is_named() -> None:
    class Reading:
        @property
        def tasks(self) -> list[dict[str, Any]]:
            raise FileNotFoundError("no train.jsonl")

        def reset(self) -> None: ...
        def get_reward(self) -> float:
            return 0.0

    class Needing(Reading):
        def __init__(self) -> None:
            import not_installed_at_all  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(InvalidEnvironment, match=r"tasks cannot be read: FileNotFoundError: no train\.jsonl"):
        load(Reading)
    with pytest.raises(InvalidEnvironment, match="needs the module 'not_installed_at_all', which is not installed"):
        load(Needing)


async def test_tasks_may_be_a_list_a_function_or_belong_to_an_instance() -> None:
    def of_instance(self: Any) -> None:
        self.tasks = [{"i": 1}, {"i": 2}]
        self.eval_tasks = [{"i": 3}]

    async def fetch(self: Any, index: int) -> dict[str, int]:
        return {"i": index * 10}

    kept = load(world(__init__=of_instance))
    static = load(world(tasks=staticmethod(lambda index: {"i": index}), num_tasks=5))
    method = load(world(tasks=fetch, num_tasks=3, eval_tasks=[{"i": 7}]))
    none = load(world())
    assert [kept.num_tasks(split) for split in Split] == [2, 1]
    assert [static.num_tasks(split) for split in Split] == [5, 0]
    assert [method.num_tasks(split) for split in Split] == [3, 1]
    assert [none.num_tasks(split) for split in Split] == [1, 0]
    assert await kept.task(Split.TRAIN, 1) == {"i": 2}
    assert await kept.task(Split.EVAL, 0) == {"i": 3}
    assert await static.task(Split.TRAIN, 4) == {"i": 4}
    assert await method.task(Split.TRAIN, 2) == {"i": 20}
    assert await none.task(Split.TRAIN, 0) == {}


async def test_a_task_that_is_not_there_is_a_failure_of_its_phase() -> None:
    def broken(index: int) -> Any:
        return {} if index else 1 / 0

    environment = load(world(tasks=staticmethod(broken), num_tasks=2))
    for index in (-1, 2, 0):
        with pytest.raises(EnvironmentFailed) as error:
            await environment.task(Split.TRAIN, index)
        assert error.value.phase == "task"


def test_tasks_on_the_class_need_no_instance() -> None:
    def refuse(self: Any) -> None:
        raise AssertionError("made an instance")

    assert load(world(__init__=refuse, tasks=[{}, {}])).num_tasks(Split.TRAIN) == 2
