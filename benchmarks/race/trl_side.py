"""TRL's side of the race: ``GRPOTrainer`` with its own tool loop on the calculator. Runs in TRL's environment.

    python -m benchmarks.race.trl_side MODEL ORDERS OUT

It writes into OUT the weights after every step, ``timeline.jsonl`` with when that was, and ``first_batch.json`` with
the tokens of the first step. Writing weights is not part of what TRL does here, so its time is counted apart.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from environments.calculator import Calculator


def calculate(expression: str):  # type: ignore[no-untyped-def]
    # No return type: it would be written into the prompt.
    try:
        return Calculator().calculate(expression)
    except ValueError as error:
        return f"error: {type(error).__name__}: {error}"  # in the words that a policy reads here


calculate.__doc__ = Calculator.calculate.__doc__


def reward(completions: list[list[dict[str, Any]]], expression: list[str], **_: Any) -> list[float]:
    return [_score(messages, task) for messages, task in zip(completions, expression, strict=True)]


def _score(messages: list[dict[str, Any]], expression: str) -> float:
    """The environment's own: the last words are the answer, unless they are a call."""
    world, last = Calculator(), messages[-1]
    world.reset(expression)
    if last["role"] == "assistant" and not last.get("tool_calls"):
        world.on_message(last["content"])
    return world.get_reward()


class Racer(GRPOTrainer):
    """Adds clocks, and keeps what the first batch consisted of."""

    def __init__(self, out: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.out = out
        self.generate_s = 0.0
        self.first: list[dict[str, Any]] | None = None

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        generated = super()._generate(prompts)
        self.generate_s += time.perf_counter() - started
        if self.first is None:
            prompt_ids, completion_ids, tool_mask, *_ = generated
            parts = zip(prompts, prompt_ids, completion_ids, tool_mask, strict=True)
            self.first = [
                {"question": prompt[1]["content"], "prompt_ids": ids, "completion_ids": said, "mask": mask}
                for prompt, ids, said, mask in parts
            ]
        return generated

    def _calculate_rewards(self, *arguments: Any) -> Any:
        rewards = super()._calculate_rewards(*arguments)
        path = self.out / "first_batch.json"
        if self.first is not None and not path.exists():
            scored = zip(self.first, rewards[:, 0].tolist(), strict=True)
            path.write_text(json.dumps([episode | {"reward": reward} for episode, reward in scored]))
        return rewards


class Timeline(TrainerCallback):
    def __init__(self, out: Path, updates_per_step: int) -> None:
        self.out = out
        self.updates_per_step = updates_per_step
        self.saving_s = 0.0
        self.trainer: Racer | None = None

    def write(self, **record: Any) -> None:
        with (self.out / "timeline.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.write(step=0, at=time.time(), not_counted_s=0.0)

    def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        step, rest = divmod(state.global_step, self.updates_per_step)
        if rest:
            return
        at, started = time.time(), time.perf_counter()
        assert self.trainer is not None
        self.trainer.model.save_pretrained(self.out / f"step-{step}")
        self.write(step=step, at=at, not_counted_s=self.saving_s, generate_s=self.trainer.generate_s)
        self.saving_s += time.perf_counter() - started

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any], **___: Any) -> None:
        with (self.out / "logs.jsonl").open("a") as file:
            file.write(json.dumps({"update": state.global_step, **logs}) + "\n")


def main(model: Path, orders_file: Path, out: Path) -> None:
    torch.set_num_threads(1)
    orders = json.loads(orders_file.read_text())
    out.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # the model calls tools as Qwen3 does, its template is its own
    updates_per_step = orders["setting"]["minibatches"]
    timeline = Timeline(out, updates_per_step)
    trainer = Racer(
        out,
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out / "trainer"), logging_steps=updates_per_step, **orders["arguments"]),
        train_dataset=Dataset.from_list(orders["rows"]),
        processing_class=tokenizer,
        tools=[calculate],
        callbacks=[timeline],
    )
    timeline.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
