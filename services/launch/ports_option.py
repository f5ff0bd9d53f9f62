"""The ports of an installation as one word of a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from gspo_core.cli.command import CommandError
from services.launch.installation import Ports
from services.launch.placement import Member
from services.launch.topology import ENGINE, TRAINER

NAMES = tuple(one.name for one in fields(Ports))
DEFAULT = ",".join(str(getattr(Ports(), name)) for name in NAMES)
HELP = f"for {', '.join(NAMES)}"
_COUNTED = {"engine": ENGINE, "ranks": TRAINER}
_PORT = re.compile(r"[0-9]{1,5}")


def read(text: str, members: Sequence[Member] = ()) -> Ports:
    """``members``: those that get the ports. Raises CommandError."""
    words = text.split(",")
    if len(words) != len(NAMES) or not all(map(_PORT.fullmatch, words)):
        raise CommandError(f"--ports {text}: say {len(NAMES)} numbers, {HELP}")
    ports = Ports(*map(int, words))
    owners: dict[int, str] = {}
    for name in NAMES:
        first: int = getattr(ports, name)
        number = 1 + max((one.index for one in members if one.process is _COUNTED.get(name)), default=0)
        for port in range(first, first + number):
            if not 1 <= port < 1 << 16:
                raise CommandError(f"--ports {text}: {name} would have port {port}; a port is from 1 to 65535")
            if port in owners:
                raise CommandError(f"--ports {text}: {owners[port]} and {name} would both have port {port}")
            owners[port] = name
    return ports
