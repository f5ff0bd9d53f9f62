"""Turns as a codec would have read them, for tests that talk to sessions."""

from __future__ import annotations

from typing import Any

from gspo_core.env import CallStatus, Environment, Observation, ParsedTurn, ToolCall
from gspo_core.messages import Message
from gspo_core.types import Split


def call(name: str, /, **arguments: Any) -> ParsedTurn:
    return ParsedTurn("", (ToolCall(name, arguments, CallStatus.OK, "", 0, 1),))


class Played:
    def __init__(self, first: list[Message], tools: list[str]) -> None:
        self.first, self.tools = first, tools
        self.observations: list[Observation] = []
        self.answers: list[Message] = []
        self.reward, self.parts = 0.0, dict[str, float]()


async def play(
    environment: Environment, *turns: ParsedTurn | str, index: int = 0, split: Split = Split.TRAIN
) -> Played:
    session = environment.session()
    try:
        start = await session.start(await environment.task(split, index), seed=0)
        played = Played(list(start.messages), [tool["function"]["name"] for tool in start.tools])
        for turn in turns:
            observation = await session.act(ParsedTurn(turn) if isinstance(turn, str) else turn)
            played.observations.append(observation)
            played.answers += observation.messages
        played.reward, played.parts = await session.score()
        return played
    finally:
        await session.close()
