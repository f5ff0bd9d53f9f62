"""Only the plumbing of the room ``state`` knows the Redis library; everything else meets ``services.state.client``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUMBING = {
    "services/state/child.py",
    "services/state/client.py",
    "services/state/server.py",
}


def imports_redis(source: str) -> bool:
    """Under ``TYPE_CHECKING``, or within a function, it counts as well."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return any(name.partition(".")[0] == "redis" for name in names)


def test_only_the_plumbing_imports_the_redis_library() -> None:
    product = [path for name in ("gspo_core", "environments", "services") for path in (ROOT / name).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in product if imports_redis(path.read_text())}
    assert found == PLUMBING


def commands_sent(source: str) -> set[str]:
    """Names of methods that are called on something named ``redis``; to end a server is no command."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    asked = [call for call in calls if isinstance(call, ast.Attribute)]
    return {call.attr for call in asked if _last_name(call.value).strip("_") == "redis"} - {"close"}


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_only_the_room_state_sends_commands() -> None:
    others = [path for path in (ROOT / "services").rglob("*.py") if "state" not in path.relative_to(ROOT).parts]
    found = {str(path.relative_to(ROOT)): commands_sent(path.read_text()) for path in others}
    assert {path: commands for path, commands in found.items() if commands} == {}


def test_a_command_is_seen_whoever_holds_the_connection() -> None:
    assert commands_sent("await self._redis.hset(key, name)\nawait context.redis.hget(key)\n") == {"hset", "hget"}
    assert commands_sent("self._redis.close()\nStore(redis)\nawait Drains(context.redis).ask(one)") == set()


def test_an_import_is_seen_wherever_it_stands() -> None:
    assert imports_redis("if TYPE_CHECKING:\n    from redis.asyncio import Redis\n")
    assert imports_redis("def f():\n    import redis\n")
    assert not imports_redis("from services.state.client import RedisClient\n")
