"""``gspo episodes DIR``: the episodes of an evaluation that was kept, or one of them as it was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.terminal import say
from gspo_core.evaluation.played import SETTING_FILE, EpisodePlace, Played, read_played
from gspo_core.messages import Message


def evaluation_of(which: str) -> tuple[Path, EpisodePlace | None] | None:
    """The folder that ``DIR`` or ``DIR/TASK/SAMPLE`` names, with the episode; None if it names none."""
    path = Path(which)
    if (path / SETTING_FILE).is_file():
        return path, None
    task, sample = path.parent.name, path.name
    if task.isdecimal() and sample.isdecimal() and (path.parent.parent / SETTING_FILE).is_file():
        return path.parent.parent, EpisodePlace(int(task), int(sample))
    return None


def show_kept(folder: Path, place: EpisodePlace | None, *, limit: int, max_reward: float | None, as_json: bool) -> int:
    played = read_played(folder)
    if place is not None:
        if place not in played:
            raise CommandError(f"{folder} holds no episode {place}")
        say(*([json.dumps(asdict(played[place]))] if as_json else _transcript(played[place])))
        return 0
    wanted = [one for one in played.values() if max_reward is None or _is_at_most(one, max_reward)]
    for one in sorted(wanted, key=lambda one: one.place)[:limit]:
        say(json.dumps(asdict(one)) if as_json else _line(folder, one))
    return 0


def _is_at_most(one: Played, max_reward: float) -> bool:
    """Not so of what failed: it has no reward, which is not one of 0."""
    return one.reward is not None and one.reward <= max_reward


def _line(folder: Path, one: Played) -> str:
    counts = (("turns", one.num_turns), ("tokens", one.num_tokens))
    shown = "".join(f"  {count} {name}" for name, count in counts if count is not None)
    return f"{folder}/{one.place}  reward {_number(one.reward)}{shown}  {one.failure or one.stop}"


def _transcript(one: Played) -> Iterator[str]:
    yield f"task {one.place.task}, sample {one.place.sample}, seed {one.seed}: reward {_number(one.reward)}"
    for name, value in one.parts.items():
        yield f"  {name} {value:g}"
    for message in one.messages:
        yield from _said(message)
    if not one.messages:
        yield "its conversation is not known: an agent asked for its turns elsewhere"
    yield f"\nended: {one.failure or one.stop}"


def _said(message: Message) -> Iterator[str]:
    if message.get("reasoning_content"):
        yield f"policy thinks: {message['reasoning_content']}"
    who = "policy" if message["role"] == "assistant" else message["role"]
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
    if text or who != "policy":
        yield f"{who}: {text}"
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield f"policy calls {call['function']['name']} {told}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
