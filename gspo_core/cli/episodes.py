"""``gspo episodes``: the trained episodes of a job, or one of them turn by turn as it was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from gspo_core.api_answers import EpisodeDetail, EpisodeSummary, ShownCall, ShownTurn
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say

READABLE = ("ok", "unknown_tool")
# The instructions of a coding agent, with its tools, are longer than what is said after them.
MAX_SYSTEM_CHARS, MAX_TOOLS = 1000, 50


def show(url: str, which: str, *, limit: int, step: int | None, max_reward: float | None, as_json: bool) -> int:
    """``which``: a job, or an episode as JOB/GROUP/MEMBER."""
    with connected(url) as client:
        if "/" in which:
            episode = client.episode(which)
            if as_json:
                print(json.dumps(episode))
            else:
                say(*_transcript(episode))
            return 0
        filters = {name: value for name, value in (("step", step), ("max_reward", max_reward)) if value is not None}
        found = list(islice(client.episodes(which, **filters), limit))
    for one in found:
        say(json.dumps(one) if as_json else _line(one))
    if not found and not as_json:
        print("no such episodes; the first appear with the job's first step")
    return 0


def _line(episode: EpisodeSummary) -> str:
    versions = ",".join(map(str, episode["versions"]))
    return (
        f"{episode['id']}  reward {_number(episode['reward'])}  advantage {_number(episode['advantage'])}  "
        f"{episode['num_turns']} turns  {episode['num_actions']} tokens  versions {versions}  {episode['stop_reason']}"
    )


def _transcript(episode: EpisodeDetail) -> Iterator[str]:
    yield f"{episode['id']}: {episode['status']}, reward {_number(episode['reward'])}"
    if episode["note"]:
        yield episode["note"]
    branch = 0
    for turn in episode["turns"]:
        yield _heading(turn, begins_branch=turn["branch"] != branch)
        branch = turn["branch"]
        for message in turn["messages"]:
            if message["role"] == "system":
                yield from _system(message["text"])
            else:
                yield f"{message['role']}: {message['text']}"
        if turn["reasoning"]:
            yield f"policy thinks: {turn['reasoning']}"
        if turn["text"]:
            yield f"policy: {turn['text']}"
        for call in turn["calls"]:
            yield f"policy calls {_call(call)}"
    if episode["stop_reason"]:
        yield f"\nended: {episode['stop_reason']}"


def _heading(turn: ShownTurn, *, begins_branch: bool) -> str:
    versions = ", ".join(map(str, turn["versions"]))
    parts = [f"\n--- turn {turn['turn']}", f"{turn['num_actions']} tokens of version {versions}"]
    if begins_branch:
        reason = "" if turn["reason"] is None else f" ({turn['reason']})"
        parts.append(f"a branch{reason}" + ("" if turn["parent"] is None else f" from turn {turn['parent']}"))
    return ", ".join([*parts, *([] if turn["is_trained"] else ["not trained"])])


def _system(text: str) -> Iterator[str]:
    """Cut short, with the names of the tools that it offers."""
    left_out = f" [... {len(text):,} characters in all]" if len(text) > MAX_SYSTEM_CHARS else ""
    yield f"system: {text[:MAX_SYSTEM_CHARS]}{left_out}"
    names = list(dict.fromkeys(filter(None, map(_tool_name, text.split("\n")))))
    if names:
        more = f" and {len(names) - MAX_TOOLS} more" if len(names) > MAX_TOOLS else ""
        yield f"tools: {', '.join(names[:MAX_TOOLS])}{more}"


def _tool_name(line: str) -> str | None:
    """The tool's name, if the line holds a tool's schema as chat templates write it."""
    try:
        schema = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) and "parameters" in function else None
    return name if isinstance(name, str) else None


def _call(call: ShownCall) -> str:
    if call["status"] not in READABLE:
        return f"unreadable call ({call['status']}): {call['raw'].strip()}"
    return f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
