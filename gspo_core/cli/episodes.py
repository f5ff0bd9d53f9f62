"""``gspo episodes``: the trained episodes of a job, or one of them turn by turn as it was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from gspo_core.api_answers import EpisodeDetail, EpisodeSummary, ShownCall
from gspo_core.cli.connection import connected
from gspo_core.cli.terminal import say

READABLE = ("ok", "unknown_tool")


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
    for turn in episode["turns"]:
        versions = ", ".join(map(str, turn["versions"]))
        yield f"\n--- turn {turn['turn']}, {turn['num_actions']} tokens of version {versions}"
        for message in turn["messages"]:
            if message["role"] != "system":
                yield f"{message['role']}: {message['text']}"
        if turn["reasoning"]:
            yield f"policy thinks: {turn['reasoning']}"
        if turn["text"]:
            yield f"policy: {turn['text']}"
        for call in turn["calls"]:
            yield f"policy calls {_call(call)}"
    if episode["stop_reason"]:
        yield f"\nended: {episode['stop_reason']}"


def _call(call: ShownCall) -> str:
    if call["status"] not in READABLE:
        return f"unreadable call ({call['status']}): {call['raw'].strip()}"
    return f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
