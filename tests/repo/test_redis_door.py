"""Only the plumbing of the room ``state`` knows the Redis library; everything else meets ``services.state.away``."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUMBING = {
    "services/state/away.py",
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


def test_an_import_is_seen_wherever_it_stands() -> None:
    assert imports_redis("if TYPE_CHECKING:\n    from redis.asyncio import Redis\n")
    assert imports_redis("def f():\n    import redis\n")
    assert not imports_redis("from services.state.client import RedisClient\n")
