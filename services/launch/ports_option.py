"""The five ports of an installation as one word of a command line."""

from __future__ import annotations

from dataclasses import fields

from gspo_core.cli.command import CommandError
from services.launch.installation import Ports

NAMES = tuple(one.name for one in fields(Ports))
DEFAULT = ",".join(str(getattr(Ports(), name)) for name in NAMES)


def read(text: str) -> Ports:
    """Raises CommandError."""
    words = text.split(",")
    if len(words) != len(NAMES) or not all(word.isdecimal() for word in words):
        raise CommandError(f"--ports {text}: say {len(NAMES)} numbers, for {', '.join(NAMES)}")
    return Ports(*map(int, words))
