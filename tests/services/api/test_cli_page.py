"""docs/commands.md shows what commands print: here they print it. GSPO_WRITE_PAGES=1 writes the page anew."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.cli import main
from services.state.fleet_records import TrainerRecord, WorkerRecord
from services.state.server import RedisServer
from services.state.store import Store
from tests.repo.command_page import PAGE, TITLE
from tests.services.api.api_kit import SPEC, ApiProcess

SHOWN = "\n## What they print\n"
IDS = ("job_01m8djrz63n3a72cp7m7vyag7w", "job_01m8djt04q8v5c1e9xkq2h6b3d")
MOMENT = "2026-01-31 12:00"


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url, GSPO_LEASE_S="600") as process:
        yield process


async def installation(store: Store, submit: Callable[[str], str]) -> Sequence[str]:
    """A job that has trained and one that waits: their ids."""
    first = submit("first")
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    await store.jobs.set_status(first, "running", token=claim.token)
    for step, reward in enumerate((0.25, 0.5, 0.75), 1):
        numbers = {"reward/mean": reward, "gspo/loss": -0.125}
        await store.metrics.add(first, step, numbers, token=claim.token)
        await store.events.add(first, "step", {"step": step, **numbers}, token=claim.token)
        await store.jobs.update_progress(first, claim.token, step, step)
    return first, submit("second")


COMMANDS = (
    "gspo submit job.yaml --dry-run",
    "gspo jobs",
    "gspo logs first",
    "gspo metrics last --names reward/mean",
    "gspo metrics first --csv --last 2",
    "gspo workers",
    "gspo jbos",
    "gspo pause third",
    "gspo export first",
    "gspo rm first --yes",
    "gspo cancel second",
    "gspo rm second --yes",
    "gspo version",
)


async def test_the_page_shows_what_commands_print(
    api: ApiProcess,
    store: Store,
    redis_client: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.forget_jobs()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(SPEC | {"steps": 20, "name": "third"}))

    def printed(command: str) -> str:
        words = shlex.split(command)[1:]
        server = [] if words[0] in ("version", "jbos") else ["--url", api.url]
        with contextlib.suppress(SystemExit):  # argparse's own refusal
            main([*words, *server])
        said = capsys.readouterr()
        return said.out + said.err

    def submit(name: str) -> str:
        (tmp_path / "a.json").write_text(json.dumps(SPEC | {"steps": 20, "name": name}))
        return printed("gspo submit a.json").split()[0]

    ids = await installation(store, submit)
    shown = [printed(COMMANDS[0])]  # before there is a worker, which would be asked and is not one
    await store.fleet.register_trainer(TrainerRecord(id="trainer-0", host="node-0", device="cpu"))
    await store.fleet.register_worker(WorkerRecord(id="rollout-0", host="node-0", jobs=ids[:1], num_episodes=12))
    shown += map(printed, COMMANDS[1:])
    blocks = [f"\n```text\n$ {one}\n{alike(said, ids)}```\n" for one, said in zip(COMMANDS, shown, strict=True)]
    head, _, rest = PAGE.read_text().partition(SHOWN)
    found = head + SHOWN + "".join(blocks) + TITLE + rest.partition(TITLE)[2]
    if os.environ.get("GSPO_WRITE_PAGES"):
        PAGE.write_text(found)
    assert PAGE.read_text().split("\n") == found.split("\n")


def alike(text: str, ids: Sequence[str]) -> str:
    """With the same ids and times in each run, as wide as they were."""
    for number, job in enumerate(ids):
        text = text.replace(job, IDS[number][: len(job)].ljust(len(job), "0"))
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", MOMENT, text)
    text = re.sub(r"\b\d\d:\d\d:\d\d\b", "12:00:00", text)
    return re.sub(r"\b\d+s( *)", lambda found: "2s".ljust(len(found[0])), text)


def test_what_differs_between_runs_is_made_alike() -> None:
    found: Any = alike("job_a  12s  2026-05-05 09:10 at 09:10:59", ["job_a"])
    assert found == f"{IDS[0][:5]}  2s   {MOMENT} at 12:00:00"
