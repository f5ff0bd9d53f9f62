"""Does TRL train the episodes that are trained here? Its first batch, lived through again with our codec.

What TRL's policy sampled is said again, turn by turn; the prompt, what the tool's answers put between, the mask of
trained tokens and the reward must come out the same.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.race.play import Episode, play
from environments.calculator import Calculator
from examples.demo.demonstrations import COURSE
from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import load_environment
from gspo_core.types import Split


@dataclass(frozen=True)
class TokenCheck:
    episodes: int
    with_tool: int
    """Episodes in which a tool has answered."""
    turns: int
    trained_tokens: int
    same: int
    """Episodes whose prompt, tokens, mask and reward are all the same."""
    differing: dict[str, int]
    """Why others are not."""
    example: str
    """One episode as the policy reads it; what is not trained stands in brackets."""


class NotTheSameTask(Exception):
    """TRL's side trains other tokens than ours; times would compare nothing."""


def check_tokens(model: Path, first_batch: Path, max_turns: int) -> TokenCheck:
    codec = HermesCodec(load_tokenizer(model))
    batch = json.loads(first_batch.read_text())
    replayed = asyncio.run(_replay_all(codec, batch, max_turns))
    verdicts = Counter(_verdict(theirs, ours) for theirs, ours in zip(batch, replayed, strict=True))
    same = verdicts.pop("same")
    with_tool = [one for one in batch if 0 in one["mask"]]
    found = TokenCheck(
        episodes=len(batch),
        with_tool=len(with_tool),
        turns=sum(len(list(_turns(one))) for one in batch),
        trained_tokens=sum(sum(one["mask"]) for one in batch),
        same=same,
        differing=dict(verdicts),
        example=_shown(codec, max(with_tool or batch, key=lambda one: len(one["mask"]))),
    )
    if not with_tool or same + verdicts[_NO_SECOND_TRY] < len(batch):
        raise NotTheSameTask(f"TRL's first batch is not what is trained here: {asdict(found)}")
    return found


_NO_SECOND_TRY = "a call that cannot be read: TRL takes it for the answer"


def _verdict(theirs: dict[str, Any], ours: Episode) -> str:
    if theirs["prompt_ids"] != ours.prompt_ids:
        return "other prompt"
    said, mask = theirs["completion_ids"], theirs["mask"]
    if (said, mask) == (ours.ids, ours.mask):
        return "same" if theirs["reward"] == ours.reward else "other reward"
    if ours.ids[: len(said)] == said and ours.mask[: len(said)] == mask and set(ours.mask[len(said) :]) == {0}:
        return _NO_SECOND_TRY  # it ends where the next answer of the environment would begin
    return "other tokens"


def _turns(episode: dict[str, Any]) -> Iterator[list[int]]:
    """What was sampled, turn by turn."""
    marked = zip(episode["completion_ids"], episode["mask"], strict=True)
    for trained, tokens in groupby(marked, key=lambda pair: pair[1]):
        if trained:
            yield [token for token, _ in tokens]


async def _replay_all(codec: HermesCodec, batch: list[dict[str, Any]], max_turns: int) -> list[Episode]:
    environment = load_environment(COURSE.environment)
    index_of = {Calculator().reset(**task): index for index, task in enumerate(Calculator.tasks)}

    async def replay(episode: dict[str, Any]) -> Episode:
        turns = _turns(episode)

        async def say(_: list[int]) -> list[int]:
            return next(turns, [])

        index = index_of[episode["question"]]
        return await play(environment, codec, Split.TRAIN, index, max_turns, say)

    return [await replay(episode) for episode in batch]


def _shown(codec: HermesCodec, episode: dict[str, Any]) -> str:
    text = f"[{codec.tokenizer.decode(episode['prompt_ids'])}]"
    marked = zip(episode["completion_ids"], episode["mask"], strict=True)
    for trained, tokens in groupby(marked, key=lambda pair: pair[1]):
        part = codec.tokenizer.decode([token for token, _ in tokens])
        text += part if trained else f"[{part}]"
    return text
