"""The worlds of the ladder: a plain one, every shipped environment, and every page's example that is one.

Rule: each is loaded as a user would name it, in a host of its own and with the interpreter that its file asks for. The
example that a page shows in order to refuse it (``leaking.py``) is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo_core.chat import ChatCodec
from gspo_core.json_value import JSON
from gspo_core.types import Split
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters, requirements_of
from tests.ladder import world as sized
from tests.ladder.axes import PLAIN, TOOLS, Nature
from tests.ladder.world import with_extra
from tests.repo.pages import block

ROOT = Path(__file__).parents[2]
SERVED = "environments.calculator:Calculator"
"""What the OpenEnv server of a run serves."""
EXTRA_CALL = '{"name":"extra_0","arguments":{}}'


@dataclass(frozen=True)
class World:
    name: str
    ref: str
    call: str | None
    """What the policy calls, as JSON without spaces. None: a tool that the ladder adds, if there is one."""
    config: Mapping[str, JSON] = field(default_factory=dict)

    def says(self, num_tools: int) -> str | None:
        return self.call or (EXTRA_CALL if num_tools else None)


def shipped(openenv_url: str) -> list[World]:
    calculate = '{"name":"calculate","arguments":{"expression":"2+3"}}'
    return [
        World("calculator", "environments.calculator:Calculator", calculate),
        World("gsm8k", "environments.gsm8k:GSM8K", calculate),
        World("python_tool", "environments.python_tool:PythonTool", '{"name":"python","arguments":{"code":"6*7"}}'),
        World("search_qa", "environments.search_qa:SearchQA", '{"name":"search","arguments":{"query":"river"}}'),
        World("openenv", "environments.adapters.openenv:OpenEnv", calculate, {"url": openenv_url, "num_tasks": 8}),
    ]


def adapters(interpreters: Interpreters) -> list[World]:
    """Those that bring packages of their own. Raises InvalidEnvironment where they cannot be installed."""
    lake: dict[str, JSON] = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
    mcp, server = "environments.adapters.mcp:Mcp", ROOT / "tests" / "environments" / "mcp_server.py"
    shop: dict[str, JSON] = {
        "command": [interpreters.find(mcp), str(server)],
        "reward": f"{server}:reward",
        "tasks": [{"prompt": f"Order tea for {3 * cups} dollars.", "price": 3 * cups} for cups in range(1, 9)],
    }
    return [
        World("gym", "environments.adapters.gym:gym", '{"name":"act","arguments":{"action":"down"}}', lake),
        World(
            "reasoning_gym",
            "environments.adapters.reasoning_gym:ReasoningGym",
            None,
            {"name": "leg_counting", "num_tasks": 8, "num_eval_tasks": 2},
        ),
        World("mcp", mcp, '{"name":"order","arguments":{"drink":"tea"}}', shop),
    ]


def of_pages(folder: Path) -> list[World]:
    add = '{"name":"add","arguments":{"amount":2}}'
    shown = [
        ("README.md", "class Counter", "counter.py:Counter", add),
        ("environments/README.md", "class Counter", "bounded_counter.py:Counter", add),
        ("docs/environments.md", '"""shop.py"""', "shop.py:Shop", '{"name":"pack","arguments":{"item":"tea"}}'),
        ("docs/environments.md", '"""prices.py"""', "prices.py:Prices", '{"name":"price","arguments":{"item":"tea"}}'),
        ("docs/environments.md", '"""mine.py"""', "mine.py:world", '{"name":"increment","arguments":{"step":2}}'),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    worlds = []
    for page, containing, ref, call in shown:
        file, _, _ = ref.partition(":")
        (folder / file).write_text(block(page, containing).text)
        worlds.append(World(file.removesuffix(".py"), str(folder / ref), call))
    return worlds


def plain() -> World:
    return World(PLAIN, f"{Path(__file__).with_name('plain.py')}:Plain", None)


def larger(world: World, folder: Path) -> str:
    """A reference to ``Sized`` that asks for the packages of the world inside."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sized_{world.name}.py"
    wanted = requirements_of(world.ref)
    asked = f"# /// script\n# dependencies = {list(wanted)}\n# ///\n" if wanted else ""
    path.write_text(f"{asked}from {sized.__name__} import Sized\n\n__all__ = ['Sized']\n")
    return f"{path}:Sized"


async def nature(world: World, codec: ChatCodec, interpreters: Interpreters) -> Nature:
    """Found out by starting an episode of its first task."""
    python = await interpreters.for_environment(world.ref)
    environment = await HostedEnvironment.open(HostOrder(world.ref, world.config, python=python))
    try:
        session = environment.session()
        start = await session.start(await environment.task(Split.TRAIN, 0), 0)
        await session.close()
    finally:
        await environment.close()
    counts = [number for number in TOOLS if number >= len(start.tools)]
    prompts = {number: len(codec.render(start.messages, with_extra(start.tools, number))) for number in counts}
    return Nature(len(start.tools), prompts)


async def natures(
    worlds: Sequence[World], codec: ChatCodec, interpreters: Interpreters, say: Callable[[str], None]
) -> dict[str, Nature]:
    found = {}
    for world in worlds:
        found[world.name] = await nature(world, codec, interpreters)
        least = min(found[world.name].prompt.values())
        say(f"{world.name}: {found[world.name].tools} tools, a prompt of {least} tokens")
    return found
