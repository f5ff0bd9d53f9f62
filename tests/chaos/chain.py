"""What a world says that has seen some calls. It needs nothing, so that agents of any Python can say it too."""

from __future__ import annotations

import hashlib


def chain(before: str, number: int) -> str:
    """What a world that stood at ``before`` says after ``number`` was added."""
    return hashlib.sha256(f"{before}+{number}".encode()).hexdigest()[:6]
