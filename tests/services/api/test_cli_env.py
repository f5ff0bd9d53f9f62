"""``gspo env`` with registered environments, against a real API and a real rollout worker."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gspo_core.cli import main
from services.process.children import die_with_parent
from services.state.server import RedisServer
from services.state.store import Store
from tests.apparatus.warm_python import Child
from tests.patience import HANG_S
from tests.services.api.api_kit import GUESS, ApiProcess

Gspo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gspo(redis_server: RedisServer, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Gspo]:
    """``gspo env ...``: its status, what it printed, what it complained about."""
    data = {"GSPO_DATA_DIR": str(tmp_path / "data")}
    own = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    with ApiProcess(redis_server.url, GSPO_ENV_UPLOADS="true", **data) as api:
        worker = Child(
            ["-m", "services.rollout"],
            env=own | {"GSPO_REDIS_URL": redis_server.url} | data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )

        def run(*arguments: str) -> tuple[int, str, str]:
            status = main(["env", *arguments, "--url", api.url])
            printed = capsys.readouterr()
            return status, printed.out, printed.err

        try:
            yield run
        finally:
            worker.terminate()
            worker.wait(HANG_S)


def test_environments_are_registered_looked_at_tried_and_removed(gspo: Gspo, tmp_path: Path):
    assert gspo("list")[1] == "no environments yet; register one with: gspo env add NAME REF\n"
    added = gspo("add", "sums", "environments.calculator:Calculator")
    assert added[0] == 0
    assert added[1].split()[0] == "sums@1"
    world = tmp_path / "shop"
    (world / "world").mkdir(parents=True)
    (world / "world" / "__init__.py").write_text("")
    (world / "world" / "guess.py").write_text(GUESS)
    (tmp_path / "guess.py").write_text(GUESS)
    for arguments in (("guess", f"{tmp_path}/guess.py:Guess"), ("shop", "world.guess:Guess", "--folder", str(world))):
        first, again = (json.loads(gspo("add", *arguments, "--json")[1]) for _ in range(2))
        assert first["id"] == again["id"] == f"{arguments[0]}@1"
    status, report, _ = gspo("validate", "shop")
    assert (status, report.splitlines()[-1]) == (0, "shop@1: sound")
    status, played, _ = gspo("try", "shop", "--task", "1")
    assert status == 0
    assert 'policy calls guess {"value": 5}' in played
    assert "reward 1" in played.splitlines()[-1]
    tried = json.loads(gspo("try", "guess", "--turns", '[{"text": "no"}]', "--json")[1])
    assert tried["reward"] == 0.0
    status, shown, _ = gspo("show", "guess@1", "--schema")
    assert "guess(value: integer)" in shown
    assert "tasks: 2 train" in shown
    assert json.loads(gspo("show", "guess", "--json")[1])["status"] == "ready"
    assert [line.split()[0] for line in gspo("list")[1].splitlines()] == ["guess@1", "shop@1", "sums@1"]
    assert [json.loads(line)["id"] for line in gspo("list", "sums", "--json")[1].splitlines()] == ["sums@1"]
    assert gspo("remove", "sums@1")[:2] == (0, "sums@1 is removed\n")
    assert gspo("list", "sums")[1].startswith("no environments yet")
    for arguments, complaint in (
        (("add", "x"), "name one source"),
        (("add", "x", "a:B", "--gym", "c"), "name one source"),
        (("add", "x", "--openenv", "ws://10.0.0.1/ws"), "not public"),
        (("add", "x", f"{tmp_path}/none.py:X"), "none.py"),
        (("add", "x", "--mcp", "https://8.8.8.8/mcp"), "--reward"),
        (("add", "x", "a.b:C", "--config", "{"), "not JSON"),
        (("try", "guess", "--turns", "{}"), "JSON list"),
        (("remove", "guess"), "guess@1"),
        (("show", "nothing"), "environment_not_found"),
    ):
        status, _, complained = gspo(*arguments)
        assert (status, complaint in complained) == (1, True), (arguments, complained)
