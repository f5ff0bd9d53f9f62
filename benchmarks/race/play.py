"""Episodes of the calculator in one process: what the judge and the check of tokens share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gspo_core.chat import HermesCodec
from gspo_core.env import Environment
from gspo_core.types import Split

Sample = Callable[[list[int]], Awaitable[list[int]]]
"""From the tokens so far to what the policy says next."""


@dataclass
class Episode:
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    """After the prompt."""
    mask: list[int] = field(default_factory=list)
    """1 where the policy has sampled."""
    reward: float = 0.0


async def play(
    environment: Environment, codec: HermesCodec, split: Split, index: int, max_turns: int, sample: Sample
) -> Episode:
    session = environment.session()
    try:
        start = await session.start(await environment.task(split, index), seed=0)
        episode = Episode(codec.render(start.messages, start.tools))
        for turn in range(max_turns):
            said = await sample(episode.prompt_ids + episode.ids)
            before = episode.prompt_ids + episode.ids
            episode.ids += said
            episode.mask += [1] * len(said)
            parsed = codec.parse(said)
            if not parsed.complete:
                break
            observation = await session.act(parsed)
            if observation.done or turn == max_turns - 1:
                break
            bridge = codec.bridge(before, said, observation.messages)
            assert isinstance(bridge, list)
            episode.ids += bridge
            episode.mask += [0] * len(bridge)
        episode.reward, _ = await session.score()
        return episode
    finally:
        await session.close()
