"""One held-out task, played under two weights and shown beside each other.

Rule: both play the very task under the same seed at the job's temperature; the task is the first one that the weights
of the start get wrong. It reads model directories only and needs no service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gspo_core.chat import HermesCodec, Message, load_tokenizer
from gspo_core.cli.terminal import plain
from gspo_core.env import Environment, load_environment
from gspo_core.job_spec import JobSpec
from gspo_core.types import Split

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text
    from transformers import PreTrainedModel

MAX_TASKS_TRIED = 20
MAX_WIDTH = 100
NARROWEST_PAIR = 76
"""Columns of a terminal below which the two stand below each other."""


@dataclass
class PlayedLine:
    who: str
    text: str


@dataclass
class Played:
    """An episode as a person reads it."""

    question: str
    lines: list[PlayedLine] = field(default_factory=list)
    reward: float = 0.0


class Player:
    """Plays held-out tasks of a job under the weights of a model directory."""

    def __init__(self, spec: JobSpec, tokenizer_dir: Path, weights_dir: Path) -> None:
        disable_progress_bar()
        self._spec = spec
        self._codec = HermesCodec(load_tokenizer(tokenizer_dir))
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            weights_dir, dtype=torch.float32, local_files_only=True
        )
        self._model.eval()

    def play(self, environment: Environment, index: int) -> Played:
        with torch.random.fork_rng():
            torch.manual_seed(self._spec.seed + index)
            return asyncio.run(self._play(environment, index))

    async def _play(self, environment: Environment, index: int) -> Played:
        session = environment.session()
        try:
            start = await session.start(await environment.task(Split.EVAL, index), index)
            played = Played(_asked(start.messages))
            ids = self._codec.render(start.messages, start.tools)
            for _ in range(self._spec.limits.max_turns or 16):
                sampled = self._sample(ids)
                played.lines.append(PlayedLine("model", self._spelt(sampled)))
                turn = self._codec.parse(sampled, start.tools)
                if not turn.complete:
                    break
                seen = await session.act(turn)
                played.lines += [PlayedLine(str(message["role"]), _text(message)) for message in seen.messages]
                bridge = None if seen.done else self._codec.bridge(ids, sampled, seen.messages)
                if not isinstance(bridge, list):
                    break
                ids = [*ids, *sampled, *bridge]
            played.reward, _ = await session.score()
        finally:
            await session.close()
        return played

    @torch.inference_mode()
    def _sample(self, ids: list[int]) -> list[int]:
        sampled: list[int] = []
        given, past = torch.tensor([ids]), None
        while len(sampled) < self._spec.sampling.max_new_tokens:
            output = self._model(input_ids=given, past_key_values=past, use_cache=True)
            past = output.past_key_values
            logits = output.logits[0, -1].float() / self._spec.sampling.temperature
            token = int(torch.multinomial(torch.softmax(logits, -1), 1))
            sampled.append(token)
            if token in self._codec.stop_ids:
                break
            given = torch.tensor([[token]])
        return sampled

    def _spelt(self, sampled: list[int]) -> str:
        is_whole = sampled[-1] in self._codec.stop_ids
        return self._codec.tokenizer.decode(sampled[:-1] if is_whole else sampled) + ("" if is_whole else " [cut off]")


def _asked(messages: Sequence[Message]) -> str:
    return next((_text(message) for message in reversed(messages) if message["role"] == "user"), "")


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else str(content)


def play_both(spec: JobSpec, before: Path, after: Path) -> tuple[Played, Played]:
    """``before`` and ``after`` are model directories; the tokenizer is that of the job's model."""
    chosen = spec.environments[0]
    environment = load_environment(chosen.ref, dict(chosen.config))
    start = Player(spec, Path(spec.model), before)
    for index in range(min(MAX_TASKS_TRIED, environment.num_tasks(Split.EVAL))):
        first = start.play(environment, index)
        if first.reward < 1.0:
            break
    return first, Player(spec, Path(spec.model), after).play(environment, index)


def show(first: Played, second: Played, headings: tuple[str, str], console: Console) -> None:
    width = min(console.width, MAX_WIDTH)
    console.print(drawn(first, second, headings, width), width=width)


def drawn(first: Played, second: Played, headings: tuple[str, str], width: int) -> RenderableType:
    """Turn beside turn, or one episode below the other where there is no room for both."""
    from rich.box import ROUNDED
    from rich.table import Table

    side_by_side = width >= NARROWEST_PAIR
    table = Table(box=ROUNDED, width=width, title=f"a held-out task: {plain(first.question)}", show_lines=True)
    for heading in headings if side_by_side else headings[:1]:
        table.add_column(heading, ratio=1, overflow="fold")
    if side_by_side:
        for left, right in zip_longest(_rounds(first), _rounds(second)):
            table.add_row(left or "", right or "")
        table.add_row(_verdict(first), _verdict(second))
        return table
    for part in (*_rounds(first), _verdict(first)):
        table.add_row(part)
    table.add_row(headings[1], style="bold")
    for part in (*_rounds(second), _verdict(second)):
        table.add_row(part)
    return table


def _rounds(played: Played) -> list[Text]:
    """What the model said, and what it was answered."""
    from rich.text import Text

    rounds: list[Text] = []
    for line in played.lines:
        said = Text.assemble((f"{line.who}: ", "bold" if line.who == "model" else "dim"), plain(line.text))
        if line.who == "model" or not rounds:
            rounds.append(said)
        else:
            rounds[-1].append("\n").append_text(said)
    return rounds


def _verdict(played: Played) -> Text:
    from rich.text import Text

    return Text(f"reward {played.reward:g}", "bold green" if played.reward >= 1.0 else "bold red")
