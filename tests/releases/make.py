"""``python -m tests.releases.make REVISION NAME``: keeps an installation of that revision in the middle of its work.

One job is killed with everything else after some steps, while its episodes are on their way; a second one waits. The
data directory and Redis as they are then become ``tests/releases/NAME.tar.xz``, for later releases to take over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import redis

from tests.releases.installation import API, ENGINE, TRAINER, WORKER, extract_tree, installed

STEPS, KILLED_AFTER = 8, 4
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


def play(revision: str, name: str, work: Path) -> None:
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
            record = {"name": name, "revision": revision, "jobs": jobs, "step": old.job(jobs[0])["step"]}
        (home / "release.json").write_text(json.dumps(record, indent=1))
        old.kill()
    pack(home, Path(__file__).with_name(f"{name}.tar.xz"))


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


def unpack(source: Path, home: Path) -> None:
    with tarfile.open(source) as tar:
        tar.extractall(home, filter="data")


def main() -> None:
    revision, name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        play(revision, name, Path(work))


if __name__ == "__main__":
    main()
