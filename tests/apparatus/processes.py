"""The processes of this machine that belong to a test: those whose environment or command names its directory."""

from __future__ import annotations

import os
from pathlib import Path


def is_running(pid: int | str) -> bool:
    """False of one that has ended, also where nobody has asked how yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone before it is opened, or while it is read
        return False


def processes_of(folder: Path) -> list[Path]:
    """Their entries below /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(entry)
    return found


def commands_of(folder: Path) -> list[str]:
    return [command(entry).replace("\0", " ") for entry in processes_of(folder)]


def pids_of(module: str, folder: Path) -> list[int]:
    """Those that run ``python -m MODULE`` themselves, not what started them."""
    entries = [entry for entry in processes_of(folder) if f"\0-m\0{module}\0" in command(entry)]
    return [int(entry.name) for entry in entries if Path(command(entry).split("\0")[0]).name.startswith("python")]


def command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


def environment(entry: Path) -> dict[str, str]:
    try:
        text = (entry / "environ").read_text()
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
