"""Two hundred episodes of a policy that samples at random from 2,048 tokens, over the real queue: nothing drifts.

Almost nothing that it samples survives decoding and encoding again, so any re-encoding anywhere would show.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.chat import ChatCodec, load_codec
from gspo_core.env import PlainEnvironment
from gspo_core.types import Branch, EpisodeKey, StopReason, Trajectory
from services.episodes.policy import Sampled
from services.workers.episode import Episode
from tests.core.chat_kit import VOCAB_SIZE, write_template, write_tokenizer
from tests.services.rollout.rollout_kit import JOB, Table, make_order, make_setting, sampled

NUM_EPISODES = 100  # of each of the two codecs

STRIPPING = """\
{%- set ns = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for t in tools or [] -%}<|im_start|>system\n<tool_call>{{ t | tojson }}<|im_end|>\n{% endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.question -%}
<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>\n{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}
"""


class Talk:
    """Answers whatever is said."""

    def reset(self) -> str:
        return "go <|im_end|> on"

    def echo(self, text: str = "") -> str:
        """Says it again.

        Args:
            text: what
        """
        return text * 2

    def on_message(self, text: str) -> str:
        return f"{text[:5]}<|im_start|>?"

    def get_reward(self) -> float:
        return 1.0


class RandomPolicy:
    """Up to 40 tokens, some of them control tokens, and often a call that can be read."""

    def __init__(self, codec: ChatCodec, generator: random.Random) -> None:
        self._codec = codec
        self._generator = generator
        names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        self._control = [codec.tokenizer.token_id(name) for name in names]
        self.said: list[list[int]] = []
        self.prompts: list[list[int]] = []

    async def sample(self, input_ids: Sequence[int], *, stop_token_ids: Collection[int], **_: Any) -> Sampled:
        generator = self._generator
        ordinary = [token for token in range(VOCAB_SIZE) if token not in stop_token_ids]
        ids: list[Any] = generator.choices(ordinary, k=generator.randint(1, 40))
        if generator.random() < 0.4:
            call = '{"name": "echo", "arguments": {"text": "a\\u00e4"}}'
            spelt = [self._codec.tokenizer.encode(letter)[0] for letter in call]
            ids += [self._control[0], *spelt, self._control[1]]
        if generator.random() < 0.3:
            ids.insert(generator.randrange(len(ids)), generator.choice(self._control))
        if generator.random() < 0.2:
            ids[:0] = [self._control[2], *generator.choices(ordinary, k=5), self._control[3]]
        ids.append(next(iter(stop_token_ids)))
        self.said.append(ids)
        self.prompts.append(list(input_ids))
        return sampled(ids)


@pytest.mark.parametrize("written_out", [True, False], ids=["hermes", "template"])
async def test_stored_ids_are_the_sampled_ones_and_prompts_only_grow(
    redis_client: Redis, tmp_path: Path, written_out: bool
) -> None:
    write_tokenizer(tmp_path)
    if not written_out:
        write_template(tmp_path, STRIPPING)
    codec = load_codec(tmp_path) if written_out else load_codec(tmp_path, calls="hermes", thinking="template")
    assert type(codec).__name__ == ("HermesCodec" if written_out else "TemplateCodec")
    table, generator = await Table.lay(redis_client), random.Random(7)
    num_turns = num_forks = num_unstable = 0
    for number in range(NUM_EPISODES):
        policy = RandomPolicy(codec, generator)
        trajectory = await play(table, codec, policy, number)
        check(trajectory, policy)
        num_turns += len(policy.said)
        num_forks += len(trajectory.branches) - 1
        num_unstable += sum(codec.tokenizer.encode(codec.tokenizer.decode(ids)) != ids for ids in policy.said)
    assert num_turns > 2 * NUM_EPISODES
    assert num_unstable > 0.8 * num_turns  # so that the test can fail
    assert (num_forks == 0) == written_out  # the template strips reasoning, and what it rewrites starts a branch


async def play(table: Table, codec: ChatCodec, policy: RandomPolicy, number: int) -> Trajectory:
    await table.dispatch(number, task=0)
    (lease,) = await table.lease()
    environment = PlainEnvironment(Talk, {}, name="tests:Talk")
    limits = {"max_turns": 6, "max_context_tokens": 4096, "on_parse_error": {"feedback": 100}}
    setting = make_setting(table, codec, policy)  # type: ignore[arg-type]
    stop = await Episode(setting, make_order(lease, environment, limits=limits)).run()
    assert stop in (StopReason.MAX_TURNS, StopReason.PARSE_ERROR)
    return Trajectory(tuple(await table.segments(EpisodeKey(JOB, number, 0))))


def check(trajectory: Trajectory, policy: RandomPolicy) -> None:
    """Zero prefix violations, and masks that cover exactly what was sampled."""
    turns = iter(zip(policy.prompts, policy.said, strict=True))
    for branch in trajectory.branches:
        numbers = sorted(set(branch.turn_ids[branch.action_mask].tolist()))
        for _ in numbers:
            prompt, said = next(turns)
            begin, end = len(prompt), len(prompt) + len(said)
            assert branch.token_ids[:begin].tolist() == prompt
            assert branch.token_ids[begin:end].tolist() == said
        assert masked(branch) == [policy.said[number] for number in numbers]
    assert next(turns, None) is None


def masked(branch: Branch) -> list[list[int]]:
    """The runs of tokens that the mask calls sampled."""
    runs: list[list[int]] = []
    before = False
    for token, is_action in zip(branch.token_ids.tolist(), branch.action_mask.tolist(), strict=True):
        if is_action and not before:
            runs.append([])
        if is_action:
            runs[-1].append(token)
        before = is_action
    return runs
