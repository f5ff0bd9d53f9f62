"""Makes a starting model for a world in a directory, with a job that trains it there.

Rule: a directory is complete or absent; nothing is downloaded; the same seed gives the same model on the same machine,
unless the world's tools are so slow that time cuts off what is played.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gspo_core.env import Environment
from gspo_core.json_value import JSON
from gspo_core.starter.playing import PlayedEpisode, chosen, play

NUM_EPISODES, PLAYED_S = 8000, 30.0
NUM_STEPS, BATCH_SIZE = 240, 24
PEAK_LR, WARMUP_STEPS = 3e-3, 10
CONTEXT_TOKENS = 2048
MAX_VOCAB_SIZE = 1024
MAX_TURNS = 6
FEWEST = 16
"""Episodes that fit the context."""
TOLD_EVERY = 20
JOB_FILE = "job.yaml"

Say = Callable[[str], None]


class CannotStart(Exception):
    """No model of this size can begin in this world; the text says why."""


def make_starter(
    environment: Environment, ref: str, config: Mapping[str, JSON], directory: Path, *, seed: int, say: Say = print
) -> None:
    """Raises ``CannotStart``, ``EnvironmentFailed``."""
    from gspo_core.testing.watch import timeouts_of

    directory = directory.resolve()
    if directory.exists():
        raise CannotStart(f"{directory} is there already: name another folder, or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    asked = environment.limits.get("max_turns")
    max_turns = min(MAX_TURNS, asked) if isinstance(asked, int) else MAX_TURNS
    say(f"playing {NUM_EPISODES} episodes of {ref} with calls at random ...")
    timeouts = timeouts_of(environment, 10.0)
    bounds = {"number": NUM_EPISODES, "max_turns": max_turns}
    episodes = asyncio.run(play(environment, timeouts, seed=seed, **bounds, seconds=PLAYED_S, tell=_telling(say)))
    rewards = [one.reward for one in episodes]
    mean = sum(rewards) / len(rewards)
    say(f"played {len(episodes)}: rewards from {min(rewards):g} to {max(rewards):g}, {mean:.3g} in the mean")
    if min(rewards) == max(rewards):
        say("all rewards are the same: nothing that is tried at random is better than the rest. An oracle would help")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch) / "made"
        _teach(made, Path(scratch) / "untrained", episodes, seed, say)
        (made / JOB_FILE).write_text(job_text(ref, config, directory, max_turns))
        os.rename(made, directory)


def _telling(say: Say) -> Callable[[int], None]:
    began = told = time.monotonic()

    def tell(number: int) -> None:
        nonlocal told
        if time.monotonic() - told >= 5.0:
            told = time.monotonic()
            say(f"  {number} episodes in {told - began:.0f} s")

    return tell


def _teach(made: Path, untrained: Path, episodes: Sequence[PlayedEpisode], seed: int, say: Say) -> None:
    import torch

    from gspo_core.chat import HermesCodec, load_tokenizer
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig
    from gspo_core.starter.lessons import lesson
    from gspo_core.starter.tokenizer import write_tokenizer
    from gspo_core.starter.untrained import write_untrained

    untrained.mkdir()
    conversations = [[*one.prompt, *one.said] for one in episodes]
    write_tokenizer(
        untrained, conversations, episodes[0].tools, max_vocab_size=MAX_VOCAB_SIZE, context_tokens=CONTEXT_TOKENS
    )
    codec = HermesCodec(load_tokenizer(untrained))
    lessons = [(one, lesson(codec, one.prompt, one.said, one.tools)) for one in episodes]
    fitting = {id(one): taught for one, taught in lessons if taught.num_tokens <= CONTEXT_TOKENS and taught.num_actions}
    if len(fitting) < min(FEWEST, len(episodes)):
        longest = max(taught.num_tokens for _, taught in lessons)
        raise CannotStart(
            f"episodes of this world have up to {longest:,} tokens, and a model of this size reads {CONTEXT_TOKENS:,}: "
            "shorten what it says, or begin with a real model (`gspo fetch Qwen/Qwen3-0.6B`)"
        )
    parameters = write_untrained(untrained, codec, seed, context_tokens=CONTEXT_TOKENS)
    say(f"teaching a model of {parameters:,} parameters to act as these episodes do ...")
    optimizer = OptimizerConfig(
        lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.01, schedule="cosine", warmup_steps=WARMUP_STEPS, min_lr_ratio=0.1
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the sums and so the model depend on the number of cores
    try:
        learner_config = LearnerConfig(optimizer=optimizer, total_steps=NUM_STEPS)
        learner = Learner(untrained, learner_config, ObjectiveConfig(), seed=seed)
        generator, began = random.Random(seed), time.monotonic()
        usable = [one for one in episodes if id(one) in fitting]
        for step in range(1, NUM_STEPS + 1):
            batch = [fitting[id(one)] for one in chosen(usable, BATCH_SIZE, generator)]
            loss = learner.supervised_step(batch)["supervised/loss"]
            if step % TOLD_EVERY == 0:
                say(f"  step {step} of {NUM_STEPS}, loss {loss:.2f}, {time.monotonic() - began:.0f} s")
        learner.save_weights(made)
        learner.close()
    finally:
        torch.set_num_threads(before)


def job_text(ref: str, config: Mapping[str, JSON], directory: Path, max_turns: int) -> str:
    """A job for episodes of some dozens of sampled tokens."""
    given = f"\n    config: {json.dumps(dict(config))}" if config else ""
    return f"""\
# Trains the model of this folder in its world: gspo submit {JOB_FILE} --watch
name: {json.dumps(ref.rpartition(":")[2] or ref)}
model: {json.dumps(str(directory))}
environments:
  - ref: {json.dumps(ref)}{given}
objective:
  name: gspo
  # The paper's 3e-4 / 4e-4 is for answers of thousands of tokens; these have some dozens.
  clip: [5.0e-2, 8.0e-2]
rollout:
  group_size: 8
  max_staleness: 2
sampling:
  max_new_tokens: 96
limits:
  max_turns: {max_turns + 1}
  max_context_tokens: {CONTEXT_TOKENS}
optimizer:
  lr: 2.0e-4
  betas: [0.9, 0.99]
  schedule: linear
steps: 80
groups_per_step: 8
"""
