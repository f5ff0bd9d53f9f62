"""Whole calculator episodes of a model directory, sampled with transformers: an independent second opinion."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from gspo_core.chat import HermesCodec, load_tokenizer
from gspo_core.env import Environment, Session, Timeouts, load_environment
from gspo_core.types import Split

# A machine that runs the whole suite at once may be slow to schedule a thread.
TIMEOUTS = Timeouts(step_timeout_s=120.0)


@dataclass
class Episode:
    session: Session
    token_ids: list[int]
    turns: list[str] = field(default_factory=list)
    num_sampled: int = 0
    done: bool = False
    reward: float = 0.0


async def play(model_dir: Path, *, split: Split, count: int, temperature: float, seed: int) -> list[Episode]:
    """``count`` episodes, one per task; temperature 0 is greedy."""
    environment = load_environment("environments.calculator:Calculator")
    codec = HermesCodec(load_tokenizer(model_dir))
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True).eval()
    torch.manual_seed(seed)
    episodes = [await _begin(environment, codec, split, index) for index in range(count)]
    for _ in range(4):
        if active := [episode for episode in episodes if not episode.done]:
            for episode, sampled in zip(active, _sample(model, codec, active, temperature), strict=True):
                await _take_turn(codec, episode, sampled)
    for episode in episodes:
        episode.reward, _ = await episode.session.score()
        await episode.session.close()
    return episodes


def success(episodes: list[Episode]) -> float:
    return sum(episode.reward for episode in episodes) / len(episodes)


def causes(episodes: list[Episode]) -> Counter[str]:
    """What became of the episodes, by the first thing that went wrong."""
    found: Counter[str] = Counter()
    for episode in episodes:
        task = episode.session._context.task["expression"]  # type: ignore[attr-defined]
        calls = [turn for turn in episode.turns if "<tool_call>" in turn]
        if episode.reward:
            found["right"] += 1
        elif not calls:
            found["guessed"] += 1
        elif not any(f'"{task}"}}}}' in turn for turn in calls):
            found["malformed" if not any('"}}' in turn for turn in calls) else "wrong expression"] += 1
        else:
            found["wrong answer"] += 1
    return found


async def _begin(environment: Environment, codec: HermesCodec, split: Split, index: int) -> Episode:
    session = environment.session(limits=TIMEOUTS)
    start = await session.start(await environment.task(split, index), seed=index)
    return Episode(session, codec.render(start.messages, start.tools))


async def _take_turn(codec: HermesCodec, episode: Episode, sampled: list[int]) -> None:
    episode.turns.append(codec.tokenizer.decode(sampled))
    episode.num_sampled += len(sampled)
    turn = codec.parse(sampled)
    if not turn.complete:
        episode.done = True
        return
    observation = await episode.session.act(turn)
    episode.done = observation.done
    bridge = codec.bridge(episode.token_ids, sampled, observation.messages)
    assert isinstance(bridge, list)
    episode.token_ids += [*sampled, *bridge]


def _sample(model: torch.nn.Module, codec: HermesCodec, episodes: list[Episode], temperature: float) -> list[list[int]]:
    width = max(len(episode.token_ids) for episode in episodes)
    padding = codec.stop_ids[-1]
    rows = [[padding] * (width - len(episode.token_ids)) + episode.token_ids for episode in episodes]
    masks = [[0] * (width - len(episode.token_ids)) + [1] * len(episode.token_ids) for episode in episodes]
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    logging.getLogger("transformers.generation").setLevel(logging.ERROR)
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(masks),
            max_new_tokens=32,
            eos_token_id=list(codec.stop_ids),
            pad_token_id=padding,
            **({"do_sample": False} | how),
        )
    return [_until_stop(row, codec.stop_ids) for row in output[:, width:].tolist()]


def _until_stop(row: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    end = next((position + 1 for position, token in enumerate(row) if token in stop_ids), len(row))
    return row[:end]
