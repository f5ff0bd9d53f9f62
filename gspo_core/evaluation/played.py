"""An episode as it was played, and the file that keeps such episodes.

Rule: a line is one episode, appended when it has ended, so that a broken evaluation goes on. A line that was torn when
its writer died is played again; of two lines of an episode the later one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from gspo_core.json_value import JSON
from gspo_core.messages import Message

SETTING_FILE, EPISODES_FILE, REPORT_FILE = "eval.json", "episodes.jsonl", "report.json"


class EpisodePlace(NamedTuple):
    """Names an episode of an evaluation."""

    task: int
    sample: int

    def __str__(self) -> str:
        return f"{self.task}/{self.sample}"


@dataclass(frozen=True, slots=True)
class Played:
    """One episode and its end."""

    place: EpisodePlace
    seed: int
    """The environment's; the same for all episodes of a task."""
    stop: str
    reward: float | None
    """None exactly where it failed."""
    failure: str | None = None
    """Why it has no reward: the phase and the reason."""
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment's author reported."""
    num_turns: int | None = None
    num_tokens: int | None = None
    """Sampled. None, like the others, if not counted: the agent asked another model."""
    num_calls: int | None = None
    num_parse_errors: int | None = None
    duration_s: float = 0.0
    messages: Sequence[Message] = ()
    """The conversation; of an agent, nothing is known."""

    def to_line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    def without_messages(self) -> Played:
        """As a report needs it: the conversations of all episodes may be more than fits into memory."""
        return replace(self, messages=())

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Played:
        return cls(**{**given, "place": EpisodePlace(*given["place"])})


def read_played(folder: Path, *, with_messages: bool = True) -> dict[EpisodePlace, Played]:
    """The episodes that ``folder`` holds."""
    file = folder / EPISODES_FILE
    if not file.is_file():
        return {}
    # Other line separators belong to the text.
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        return {one.place: one if with_messages else one.without_messages() for one in _readable(lines)}


def _readable(lines: Iterable[str]) -> Iterator[Played]:
    for line in lines:
        try:
            yield Played.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):  # torn
            continue


class PlayedFile:
    """Appends to the file of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / EPISODES_FILE).open("a+b")
        self._end_line()

    def add(self, played: Played) -> None:
        self._file.write(played.to_line().encode("utf-8", "replace"))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _end_line(self) -> None:
        """What was torn must not swallow the next line."""
        size = self._file.seek(0, 2)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")


class SettingDamaged(Exception):
    """The file of an evaluation's setting cannot be read."""


def read_setting(folder: Path) -> dict[str, JSON] | None:
    """The setting of an evaluation; None where ``folder`` holds none. Raises ``SettingDamaged``."""
    file = folder / SETTING_FILE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingDamaged(f"{file} is damaged ({error}): name another folder") from None
    return cast(dict[str, JSON], found) if isinstance(found, dict) else None


def write_whole(file: Path, content: Mapping[str, JSON]) -> None:
    """As JSON, and in place only once it is whole."""
    partial = file.with_name(partial_name(file.name))
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", errors="replace")
    partial.replace(file)


def partial_name(name: str) -> str:
    return f".{name}.part"
