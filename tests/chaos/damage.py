"""What a bad disk does to a checkpoint, of which a file is cut off or has a bit turned, and records of the queue made
unreadable.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.state.client import RedisClient
from services.state.keys import job_key

_NAME = re.compile(r"ep\d+-step\d+")
# A record that was removed meanwhile does not come back as garbage.
_SPOIL = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
_GARBAGE = (b"", b"\xc1", b"\x93\x01", b"not packed at all", b"\x80")


def damage_newest(job_dir: Path, rng: random.Random) -> str | None:
    """What was damaged and how; None where there is no checkpoint."""
    newest = newest_checkpoint(job_dir)
    if newest is None:
        return None
    path = rng.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    size = path.stat().st_size
    with path.open("r+b") as file:
        place = rng.randrange(size)
        if rng.random() < 0.5:
            file.truncate(place)
            how = f"cut off at {place} of {size}"
        else:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            how = f"bit turned at {place} of {size}"
    return f"{path.relative_to(job_dir)} {how}"


def newest_checkpoint(job_dir: Path) -> Path | None:
    root = job_dir / "checkpoints"
    found = sorted(entry for entry in root.iterdir() if _NAME.fullmatch(entry.name)) if root.is_dir() else []
    return found[-1] if found else None


def has_ended(record: bytes) -> bool:
    """Of an episode's record; a group's has no such mark."""
    try:
        state = msgspec.msgpack.decode(record)
    except msgspec.MsgspecError:
        return False
    return isinstance(state, dict) and state.get("done") is True


async def damage_record(
    client: RedisClient, job: str, table: str, rng: random.Random, tell: Callable[[int], None]
) -> int | None:
    """The group whose record, or whose episode's, is garbage now; None where there is none. Of an episode that has
    ended nobody reads the record again, which would be no fault at all.

    ``tell`` is given the group before: who is not answered does not know whether it was done.
    """
    key = job_key(job, table)
    records = await client.hgetall(key)
    fields = sorted(
        name
        for name, record in records.items()
        if isinstance(name, bytes) and isinstance(record, bytes) and not has_ended(record)
    )
    if not fields:
        return None
    field = rng.choice(fields)
    tell(int(field.partition(b":")[0]))
    if not await client.eval(_SPOIL, 1, key, field, rng.choice(_GARBAGE)):
        return None
    return int(field.partition(b":")[0])
