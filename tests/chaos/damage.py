"""What a bad disk does to a checkpoint: a file of it is cut off or has a bit turned."""

from __future__ import annotations

import random
import re
from pathlib import Path

_NAME = re.compile(r"ep\d+-step\d+")


def damage_newest(job_dir: Path, rng: random.Random) -> str | None:
    """What was damaged and how; None where there is no checkpoint."""
    root = job_dir / "checkpoints"
    found = sorted(entry for entry in root.iterdir() if _NAME.fullmatch(entry.name)) if root.is_dir() else []
    if not found:
        return None
    path = rng.choice(sorted(path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size))
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
