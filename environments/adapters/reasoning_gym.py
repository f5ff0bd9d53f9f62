"""A data set of reasoning-gym: a question, an answer between ``<answer>`` tags, and the data set's own score.

Several at once are its data set ``composite``, with ``options: {datasets: [{name: ..., weight: 2, config: {...}}]}``.

Scores are not binary: many data sets give partial credit. A scorer that raises on what the policy wrote gives 0 and is
counted; the policy caused it.
"""

# /// script
# dependencies = ["reasoning-gym==0.1.25"]
# ///

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from gspo_core.env import InvalidEnvironment
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from gspo_core.env import Context

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
EVAL_SEED = 1_000_000
"""Held-out tasks begin so far behind the seed, or farther where more are trained."""


class ReasoningGym:
    """Think step by step. Give the final answer between <answer> and </answer>."""

    reward_range = (0.0, 1.0)
    replayable = True
    limits = {"max_turns": 1}  # noqa: RUF012 - never changed

    def __init__(
        self,
        name: str,
        *,
        num_tasks: int = 1000,
        num_eval_tasks: int = 100,
        seed: int = 0,
        options: Mapping[str, JSON] | None = None,
    ) -> None:
        """``options`` go to ``reasoning_gym.create_dataset``. Item i is drawn from ``seed + i``."""
        given = json.dumps(dict(options or {}), sort_keys=True)
        self.num_tasks, self.num_eval_tasks = num_tasks, num_eval_tasks
        self._train = _dataset(name, seed, num_tasks, given)
        self._eval = _dataset(name, seed, num_eval_tasks, given, num_trained=num_tasks)

    def tasks(self, index: int) -> dict[str, bool | int]:
        return {"held_out": False, "number": index}

    def eval_tasks(self, index: int) -> dict[str, bool | int]:
        return {"held_out": True, "number": index}

    def reset(self, held_out: bool, number: int) -> str:
        self._dataset = self._eval if held_out else self._train
        self._item = self._dataset[number]
        self._said: str | None = None
        return str(self._item["question"])

    def on_message(self, text: str) -> None:
        """The answer: of several the last one counts."""
        found = _ANSWER.findall(text)
        self._said = found[-1].strip() if found else None

    def get_reward(self, ctx: Context) -> float:
        if self._said is None:
            return 0.0
        try:
            return float(self._dataset.score_answer(self._said, self._item))
        except Exception:  # what the policy wrote is more than the scorer can read
            ctx.metric("answer_unreadable", 1.0)
            return 0.0

    def _oracle_answer(self) -> str:
        return f"<answer>{self._item['answer']}</answer>"


def _first(seed: int, num_trained: int | None) -> int:
    """The seed of the first item. Held-out ones stand behind ``num_trained`` others, also where those are negative:
    Python's generator knows no sign."""
    return seed if num_trained is None else abs(seed) + max(EVAL_SEED, num_trained)


@cache
def _dataset(name: str, seed: int, size: int, options: str, num_trained: int | None = None) -> ProceduralDataset:
    """Made once in a process: some take a second."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    given = json.loads(options)
    if name == "composite":
        parts = given.get("datasets") or ()
        if not parts or not all(isinstance(part, dict) and "name" in part for part in parts):
            raise InvalidEnvironment("composite needs options.datasets, a list of {name, weight, config}")
        defaults = {"weight": 1.0, "config": {}}
        given["datasets"] = [DatasetSpec(**{**defaults, **part}) for part in parts]
        for part in given["datasets"]:
            if isinstance(part.config.get("seed"), int):
                part.config["seed"] = _first(part.config["seed"], num_trained)
    return reasoning_gym.create_dataset(name, seed=_first(seed, num_trained), size=size, **given)
