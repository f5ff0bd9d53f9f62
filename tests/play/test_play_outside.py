"""Who plays in another process and ends before its episodes do: it is told how it ended, and what it said last."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_core.env import Llm
from tests.play.outside import PLAYERS, PlayerFailed, outside
from tests.play.stage import Player

TALKS = "import json, os, sys\nfor line in sys.stdin:\n    given = json.loads(line)\n    "
REPORTS = 'print(json.dumps({"id": given["id"], "report": {"turns": 1}}), flush=True)\n'


async def ask(play: Player, name: str = "an-episode") -> Mapping[str, Any]:
    return await play({}, cast(Llm, SimpleNamespace(episode=name, base_url="http://unused", api_key="key")))


def script(folder: Path, does: str) -> str:
    (path := folder / "player.py").write_text(TALKS + does)
    return str(path)


def test_players_need_nothing_of_the_project() -> None:
    """They run in an environment of the package that they play."""
    for path in PLAYERS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        roots = {name.partition(".")[0] for name in names}
        assert roots.isdisjoint({"tests", "gspo_core", "services", "benchmarks", "environments"}), path


async def test_it_reports_and_leaves(tmp_path: Path) -> None:
    async with outside(Path(sys.executable), script(tmp_path, REPORTS)) as play:
        assert await ask(play) == {"turns": 1}
        assert await ask(play, "another") == {"turns": 1}


async def test_what_it_meets_is_told(tmp_path: Path) -> None:
    does = 'print(json.dumps({"id": given["id"], "error": "OSError: no", "trace": "in line 1"}), flush=True)\n'
    async with outside(Path(sys.executable), script(tmp_path, does)) as play:
        with pytest.raises(PlayerFailed, match="OSError: no\nin line 1"):
            await ask(play)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("sys.exit('so it ends')", r"has ended \(status 1\); it said last: .*so it ends"),
        ("os._exit(7)", r"has ended \(status 7\); it said last: nothing"),
        ("os.kill(os.getpid(), 9)", r"has ended \(SIGKILL\)"),
        ("os.abort()", r"(?s)has ended \(SIGABRT\); it said last: .*Fatal Python error: Aborted"),
        ("print('no report', flush=True)", r"reports cannot be read: .*has ended \(SIGKILL\)"),
        ("print('{}', flush=True)", r"reports cannot be read: 'id'; its process has ended"),
    ],
)
async def test_its_end_is_told_to_each_episode(does: str, told: str, tmp_path: Path) -> None:
    async with outside(Path(sys.executable), script(tmp_path, f"{does}\n")) as play:
        with pytest.raises(PlayerFailed, match=told):
            await ask(play)
        with pytest.raises(PlayerFailed, match=told):
            await ask(play, "another")


async def test_of_much_that_it_says_the_end_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    does = "sys.stderr.write('a line\\n' * 50_000 + 'the last one')\n    sys.stderr.flush()\n    os._exit(1)\n"
    async with outside(Path(sys.executable), script(tmp_path, does)) as play:
        with pytest.raises(PlayerFailed, match="the last one") as told:
            await ask(play)
    assert str(told.value).count("a line") < 50
    assert capsys.readouterr().err.count("a line") == 50_000
