"""Why an episode was given up: ``python -m tests.chaos.deaths WORKDIR``, where a run was kept.

The rule kept here: it is read from the append-only log that Redis left, which has every record that was written of an
episode in their order; each is told as (segments, furthest, deaths, failures).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

COUNTED = ("segments", "furthest", "deaths", "failures")
Episode = tuple[str, str]
"""The key of a job's episodes, and "group:member"."""
Counts = tuple[int, ...]


def commands(data: bytes) -> Iterator[list[bytes]]:
    """Up to where the log breaks off."""
    at = 0

    def number(mark: bytes) -> int:
        nonlocal at
        end = data.index(b"\r\n", at)
        if data[at : at + 1] != mark:
            raise ValueError(data[at:end])
        value, at = int(data[at + 1 : end]), end + 2
        return value

    while at < len(data):
        if data[at : at + 1] == b"#":  # a time
            at = data.index(b"\n", at) + 1
            continue
        found = []
        for _ in range(number(b"*")):
            size = number(b"$")
            found.append(data[at : at + size])
            at += size + 2
        yield found


def given_up(log: bytes) -> dict[Episode, list[Counts]]:
    """With all that was ever counted of each."""
    told: dict[Episode, list[Counts]] = {}
    dead: dict[Episode, list[Counts]] = {}
    for name, *args in commands(log):
        if name.upper() != b"HSET" or not args[0].endswith(b"episodes"):
            continue
        for episode, packed in zip(args[1::2], args[2::2], strict=True):
            state, key = msgspec.msgpack.decode(packed), (args[0].decode(), episode.decode())
            told.setdefault(key, []).append(tuple(state[one] for one in COUNTED))
            if state.get("dead"):
                dead[key] = told[key]
    return dead


def deaths_without_progress(counts: list[Counts]) -> int:
    """How often a holder was lost since the episode last got further: deaths of holders and failures follow each
    other in the last records."""
    *_, (_, _, deaths, failures) = counts
    return deaths + failures


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("redis/appendonlydir/*.incr.aof")):
        for (key, episode), counts in given_up(path.read_bytes()).items():
            print(f"{key} {episode}: lost {deaths_without_progress(counts)} times without getting further")
            print("  " + " ".join(str(one) for one in dict.fromkeys(counts)))


if __name__ == "__main__":
    main()
