"""What is told of an environment as JSON: how it describes itself, its first prompts, and what checks have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict

from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolSchema

Measured: TypeAlias = float | Sequence[str] | Sequence[float] | Mapping[str, float]


class EnvironmentDescription(TypedDict):
    """What others need to know of an environment without running its code."""

    name: str
    num_tasks: dict[str, int]
    tools: list[ToolSchema]
    system_prompt: str | None
    limits: dict[str, JSON]
    replayable: bool
    reward_range: list[float] | None


class FirstPrompt(TypedDict):
    task: int
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]


class Starts(TypedDict):
    starts: list[FirstPrompt]
    limits: Mapping[str, JSON]


class CheckRecord(TypedDict):
    id: str
    status: str
    message: str
    data: Mapping[str, Measured]


class ReportRecord(TypedDict):
    name: str
    checks: list[CheckRecord]


class JudgedRecord(ReportRecord):
    ok: bool
