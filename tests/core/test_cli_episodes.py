"""An episode as ``gspo episodes`` prints it: branches, instructions and tools."""

from __future__ import annotations

import json
from typing import Any, cast

from gspo_core.api_answers import EpisodeDetail
from gspo_core.cli.episodes import MAX_SYSTEM_CHARS, MAX_TOOLS, _transcript


def turn(number: int, branch: int = 0, parent: int | None = None, **changes: Any) -> dict[str, Any]:
    said = {"messages": [], "reasoning": "", "text": "", "calls": []}
    place = {"turn": number, "branch": branch, "num_actions": 5, "versions": [3], "parent": parent}
    return place | said | {"reason": None, "is_trained": True} | changes


def printed(*turns: dict[str, Any]) -> list[str]:
    episode = {"id": "job/0/1", "status": "done", "reward": 0.5, "note": None, "stop_reason": None, "turns": turns}
    return list(_transcript(cast(EpisodeDetail, episode)))[1:]


def offering(*names: str) -> str:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    return "Be brief.\n<tools>\n" + "\n".join(map(json.dumps, tools)) + "\n</tools>"


def test_a_branch_says_why_it_began_and_what_it_goes_on_from() -> None:
    assert printed(
        turn(0),
        turn(1, parent=0),
        turn(2, 1, reason="sub_agent", is_trained=False),
        turn(3, 2, parent=0, reason="edited_history"),
        turn(4, 2, parent=3),
        turn(5, 3, parent=1),
    ) == [
        "\n--- turn 0, 5 tokens of version 3",
        "\n--- turn 1, 5 tokens of version 3",
        "\n--- turn 2, 5 tokens of version 3, a branch (sub_agent), not trained",
        "\n--- turn 3, 5 tokens of version 3, a branch (edited_history) from turn 0",
        "\n--- turn 4, 5 tokens of version 3",
        "\n--- turn 5, 5 tokens of version 3, a branch from turn 1",
    ]


def test_what_the_policy_was_told_first_stands_there_with_the_names_of_its_tools() -> None:
    text = offering("search", "read") + '\n{"name": "no tool"}\n{broken'
    messages = [{"role": "system", "text": text}, {"role": "user", "text": "hi"}]
    assert printed(turn(0, messages=messages))[1:] == [f"system: {text}", "tools: search, read", "user: hi"]
    assert printed(turn(0, messages=[{"role": "system", "text": "Be brief."}]))[1:] == ["system: Be brief."]


def test_a_tool_is_named_whatever_separates_lines_in_its_description() -> None:
    tool = {"name": "search", "description": "Search.\u2028Be brief.", "parameters": {}}
    text = json.dumps(tool, ensure_ascii=False)
    assert printed(turn(0, messages=[{"role": "system", "text": text}]))[-1] == "tools: search"


def test_of_long_instructions_and_many_tools_a_part_is_printed() -> None:
    names = [f"tool_{number}" for number in range(MAX_TOOLS + 7)]
    text = offering(*names)
    told, tools = printed(turn(0, messages=[{"role": "system", "text": text}]))[1:]
    assert told == f"system: {text[:MAX_SYSTEM_CHARS]} [... {len(text):,} characters in all]"
    assert tools == f"tools: {', '.join(names[:MAX_TOOLS])} and 7 more"
