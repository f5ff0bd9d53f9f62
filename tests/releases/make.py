"""``python -m tests.releases.make REVISION NAME``: keeps an installation of that revision in the middle of its work.

One job is killed with everything else after some steps, while its episodes are on their way; a second one waits. The
data directory and Redis as they are then become ``tests/releases/NAME.tar.xz``, for later releases to take over,
together with the numbers and digests of what it wrote (``tests/repo/formats.json``). ``--into DIRECTORY`` keeps it
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import redis

from tests.releases.installation import API, ENGINE, PRESENT, TRAINER, WORKER, extract_tree, installed

STEPS, KILLED_AFTER = 8, 4
FORMATS = "tests/repo/formats.json"
# What a packed installation consists of.
PARTS = ("release.json", "world.py", "model", "data", "redis")
WORLD = '''
class Sums:
    """Add up."""

    tasks = [{"number": number} for number in range(16)]
    eval_tasks = [{"number": number} for number in range(100, 102)]
    replayable = True

    async def reset(self, number: int) -> str:
        self._sum = 0
        return f"task {number}"

    async def add(self, number: int) -> str:
        """Add to the sum.

        Args:
            number: what to add
        """
        self._sum += number
        return str(self._sum)

    async def get_reward(self) -> float:
        return (self._sum % 97) / 97
'''
_NOT_PACKED = (".sock", ".pid", ".log", ".lock")


def play(revision: str, name: str, work: Path, into: Path) -> None:
    tree = extract_tree(revision, work / "tree")
    home = work / "home"
    home.mkdir()
    write_world_and_model(home, tree)
    with installed(home) as old:
        old.start(ENGINE, API, TRAINER, WORKER, tree=tree)
        jobs = [old.submit(number, STEPS) for number in (0, 1)]
        old.wait_for("steps", lambda: old.job(jobs[0])["step"] >= KILLED_AFTER)
        with redis.Redis.from_url(old.redis_url) as client:
            old.wait_for("segments on their way", lambda: _num_held(client, jobs[0]) > 0)
            record = {"name": name, "revision": commit_of(revision), "jobs": jobs, "step": old.job(jobs[0])["step"]}
        if (tree / FORMATS).exists():
            record["formats"] = json.loads((tree / FORMATS).read_text())
        (home / "release.json").write_text(json.dumps(record, indent=1))
        old.kill()
    pack(home, into / f"{name}.tar.xz")


def write_world_and_model(home: Path, tree: Path) -> None:
    (home / "world.py").write_text(WORLD)
    make_model = [sys.executable, "-m", "tests.chaos.model", "model"]
    subprocess.run(make_model, cwd=home, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)


def _num_held(client: redis.Redis, job: str) -> int:
    held = int(client.zcard(f"gspo:{{{job}}}:held"))
    return held if int(client.xlen(f"gspo:{{{job}}}:segments")) else 0


def pack(home: Path, target: Path) -> None:
    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith(_NOT_PACKED) or not (member.isfile() or member.isdir()) else member

    with tarfile.open(target, "w:xz") as tar:
        for part in PARTS:
            tar.add(home / part, part, filter=keep)
    print(f"{target.name}: {target.stat().st_size:,} bytes")


def commit_of(revision: str) -> str:
    named = subprocess.run(["git", "rev-parse", revision], cwd=PRESENT, check=True, capture_output=True, text=True)
    return named.stdout.strip()


def about(release: Path) -> dict[str, Any]:
    """What ``release.json`` in a packed installation says."""
    with tarfile.open(release) as tar:
        file = tar.extractfile("release.json")
        assert file is not None
        record: dict[str, Any] = json.load(file)
    return record


def unpack(source: Path, home: Path) -> None:
    with tarfile.open(source) as tar:
        tar.extractall(home, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.releases.make")
    parser.add_argument("revision")
    parser.add_argument("name", help="of the release, such as 0.2.0")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        play(given.revision, given.name, Path(work), given.into)


if __name__ == "__main__":
    main()
