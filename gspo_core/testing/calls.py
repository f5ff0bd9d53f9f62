"""Whether the calls of rehearsed episodes did anything: an environment in which none succeeds cannot teach.

Rule: a world is refused where its tools fail whatever they are given; where random arguments may be to blame, the
author is told to give an oracle, whose calls then decide. It plays nothing itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_core.testing.report import Check, Status

# What differs between two objects of a kind, in the text of an error.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Answered:
    """One call of a rehearsal."""

    tool: str
    arguments: str
    """As JSON, to tell calls apart."""
    answer: str

    @property
    def error(self) -> str | None:
        """What went wrong, in our words (``error: ...``) or in TRL's (``{"error": ...}``)."""
        if self.answer.startswith("error:"):
            return _ADDRESS.sub("0x", self.answer.removeprefix("error:").strip())
        try:
            value = json.loads(self.answer.replace("'", '"')) if self.answer.startswith("{") else None
        except ValueError:
            value = None
        is_error = isinstance(value, dict) and list(value) == ["error"]
        is_error = is_error or self.answer.startswith(("{'error': ", '{"error": '))
        return _ADDRESS.sub("0x", self.answer) if is_error else None


def calls_check(random: Sequence[Answered], oracle: Sequence[Answered] | None) -> Check:
    """``oracle`` is None where there is none, or where it calls nothing."""
    judged = oracle or random
    if not judged:
        return Check("calls", Status.SKIP, "no tool was called")
    errors = [one.error for one in judged if one.error is not None]
    data = {"calls": len(judged), "errors": len(errors)}
    if len(errors) < len(judged):
        if useless := _tools_that_never_worked(judged):
            return Check("calls", Status.WARN, "; ".join(useless), data)
        return Check("calls", Status.PASS, f"{len(judged) - len(errors)} of {len(judged)} calls succeeded", data)
    whose = "of the oracle's calls" if oracle else "random calls"
    shown = f"none of {len(judged)} {whose} succeeded, for example: {errors[0][:_SHOWN]}"
    if oracle or _fail_whatever_they_are_given(judged):
        return Check("calls", Status.FAIL, shown, data)
    advice = "if only random arguments are to blame, define an oracle: its calls are then checked"
    return Check("calls", Status.WARN, f"{shown}; {advice}", data)


def _tools_that_never_worked(judged: Sequence[Answered]) -> list[str]:
    """A sentence for each tool that fails in the same way whatever it is given."""
    by_tool: dict[str, list[Answered]] = {}
    for one in judged:
        by_tool.setdefault(one.tool, []).append(one)
    return [
        f"no call of {tool} succeeded ({len(calls)} of {len(judged)}), for example: {(calls[0].error or '')[:_SHOWN]}"
        for tool, calls in by_tool.items()
        if all(one.error is not None for one in calls) and _fail_whatever_they_are_given(calls)
    ]


def _fail_whatever_they_are_given(judged: Sequence[Answered]) -> bool:
    """Every tool that was called fails in the same way each time: its arguments have no say in it."""
    tools = {one.tool for one in judged}
    return all(len({one.error for one in judged if one.tool == tool}) == 1 for tool in tools) and (
        len({(one.tool, one.arguments) for one in judged}) > len(tools) or all(one.arguments == "{}" for one in judged)
    )
