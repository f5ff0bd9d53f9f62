"""Which streamed answers are open between agents and the gateway, and whom engines sample for: read along on lines.

The rule kept here: a stream is open from its first event, once that was passed to the agent, until its last one was.
Who strikes is told which are open at that moment, but for those that a kill before has doomed. The last event may have
been on its way even then, so that of each stream that was struck it is noted whether its end came after all; only one
whose end never came was really cut.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.lines import Tap
from tests.chaos.processes import stamp

IN_A_STREAM = "in a stream"
"""The kinds of faults that end so wait for an open one."""
BEGINS, EVENT, ENDS = b"text/event-stream", b"\ndata: ", b"data: [DONE]"
TASK = re.compile(r"task (?P<task>\d+) (?P<run>[0-9a-f]{6})")
"""Whose turn it is, in what an agent of a chaos run is told first."""
_IDS = re.compile(rb'"input_ids":\s*\[([\d,\s]+)\]')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
WHOLE, CUT = "whole", "cut"


@dataclass(eq=False)
class Stream:
    """An answer that is passed to an agent as it is sampled."""

    task: int
    run: str
    since: float = field(default_factory=time.monotonic)
    num_events: int = 0
    end: str = ""
    strikes: list[int] = field(default_factory=list)
    """The numbers of those that met it open."""
    is_doomed: bool = False
    """Who answers it or who hears it was killed a moment ago: it is not met again."""

    def told(self) -> dict[str, Any]:
        open_s = round(time.monotonic() - self.since, 3)
        return {"task": self.task, "run": self.run, "events": self.num_events, "open_s": open_s}


Strike = Callable[[list[Stream], int], bool]
"""Told what is open and its own number; False where none of that is what it waits for."""


@dataclass(frozen=True)
class Wait:
    kind: str
    into_s: float
    """How long after the beginning of a stream."""
    strike: Strike


class Streams:
    """``path``: where it is noted how the streams ended that were struck. ``names`` finds a run in a request."""

    def __init__(self, path: Path, names: re.Pattern[str] = TASK) -> None:
        self._path = path
        self.names = names
        self._waits: list[Wait] = []
        self._num_strikes = 0
        self.open: list[Stream] = []

    def wait(self, wait: Wait) -> None:
        """For a stream that is open; it may be one that is open already."""
        self._waits.append(wait)
        if self.open:
            self._later(wait)

    def is_awaited(self, kind: str) -> bool:
        return any(wait.kind == kind for wait in self._waits)

    def forget(self) -> None:
        self._waits.clear()

    def began(self, stream: Stream) -> None:
        self.open.append(stream)
        for wait in self._waits:
            self._later(wait)

    def ended(self, stream: Stream, how: str) -> None:
        self.open.remove(stream)
        stream.end = how
        if stream.strikes:
            with self._path.open("ab") as file:
                file.write(stamp(**stream.told(), end=how, strikes=stream.strikes) + b"\n")

    def _later(self, wait: Wait) -> None:
        asyncio.get_running_loop().call_later(wait.into_s, self._meet, wait)

    def _meet(self, wait: Wait) -> None:
        met = [stream for stream in self.open if not stream.is_doomed]
        if wait in self._waits and met and wait.strike(met, self._num_strikes):
            self._waits.remove(wait)
            for stream in met:
                stream.strikes.append(self._num_strikes)
            self._num_strikes += 1

    def tap(self) -> Tap:
        return _AgentTap(self)


class _AgentTap(Tap):
    """One connection of an agent: its requests follow one another."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._asked = self._tail = b""
        self._is_answered = self._is_stream = False
        self._stream: Stream | None = None

    def sent(self, data: bytes) -> None:
        self._asked = data if self._is_answered else self._asked + data
        self._is_answered = False

    def came(self, data: bytes) -> None:
        if not self._is_answered:
            self._is_answered, self._is_stream, self._tail = True, BEGINS in data, b""
        if not self._is_stream:
            return
        read, self._tail = self._tail + data, data[-len(ENDS) :]
        if self._stream is None and EVENT in b"\n" + read:
            self._begin()
        if self._stream is not None:
            self._stream.num_events += data.count(b"data: ")
            if ENDS in read:
                self._end(WHOLE)

    def closed(self) -> None:
        self._end(CUT)

    def _begin(self) -> None:
        found = self._streams.names.search(self._asked.decode(errors="replace"))
        named = found.groupdict() if found else {}
        self._stream = Stream(int(named.get("task", -1)), named.get("run", ""))
        self._streams.began(self._stream)

    def _end(self, how: str) -> None:
        if self._stream is not None:
            self._streams.ended(self._stream, how)
            self._stream, self._is_stream = None, False


class Sampling:
    """For whom an engine samples: the run's name of each request that it has not answered."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._taps: set[_EngineTap] = set()

    @property
    def runs(self) -> list[str]:
        return [tap.run for tap in self._taps if tap.run]

    def tap(self) -> Tap:
        tap = _EngineTap(self)
        self._taps.add(tap)
        return tap

    def gone(self, tap: _EngineTap) -> None:
        self._taps.discard(tap)

    def run_of(self, body: bytes) -> str:
        ids = _IDS.search(body)
        found = TASK.search(self._decode([int(one) for one in ids[1].split(b",")])) if ids else None
        return found["run"] if found else ""


class _EngineTap(Tap):
    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._asked = b""
        self.run = ""

    def sent(self, data: bytes) -> None:
        if data.startswith(b"POST /"):
            self._asked = b""
        self._asked += data
        if self._asked.startswith(b"POST /generate") and self._is_whole():
            self.run = self._sampling.run_of(self._asked)

    def _is_whole(self) -> bool:
        head, found, body = self._asked.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        return bool(found) and length is not None and len(body) >= int(length[1])

    def came(self, data: bytes) -> None:
        self._asked, self.run = b"", ""

    def closed(self) -> None:
        self._sampling.gone(self)


def told(happened: Iterable[dict[str, Any]], ended: Iterable[dict[str, Any]]) -> list[str]:
    """What kills met, by whom they killed: lines for the end of a run."""
    kills = [one for one in happened if one["kind"].endswith(IN_A_STREAM)]
    if not kills:
        return []
    cut = {number for one in ended if one["end"] == CUT for number in one["strikes"]}
    ends = Counter((number, one["end"]) for one in ended for number in one["strikes"])
    lines = []
    for kind in sorted({one["kind"] for one in kills}):
        mine = [one for one in kills if one["kind"] == kind]
        open_ones = sum(len(one["open"]) for one in mine)
        by_end = {end: sum(ends[one["strike"], end] for one in mine) for end in (CUT, WHOLE)}
        lines.append(
            f"{kind}: {len(mine)} times, {open_ones} streams were open, of which {by_end[CUT]} never came to their end "
            f"on their connection and {by_end[WHOLE]} did; {sum(one['strike'] in cut for one in mine)} kills cut one"
            + (f"; for {sum(len(one['sampled']) for one in mine)} it sampled" if "sampled" in mine[0] else "")
        )
    return lines


def told_of(work: Path) -> list[str]:
    return told(_lines(work / "happened.jsonl"), _lines(work / "streams.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
