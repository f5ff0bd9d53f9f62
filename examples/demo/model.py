"""Makes the demo's model: about a million parameters in the shape of Qwen3, a tokenizer, and a mediocre warm start.

Rule: the same seed on the same machine gives the same model, nothing is downloaded, and a directory is complete or
absent. The warm start practises calling and copying, then imitates an oracle that errs (``demonstrations``), on
questions of training tasks alone, until the model has every skill and every bad habit; sharpening is left to the demo.
A random start that is slow to copy is given up for another one; which, follows from the seed too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo import course, demonstrations
from examples.demo.course import Course, Mistakes, Task
from gspo_core.chat import HermesCodec, Message, load_tokenizer
from gspo_core.env import PlainEnvironment, load_environment
from gspo_core.env.prompt import first_messages
from gspo_core.json_value import JSON
from gspo_core.starter import lessons, tokenizer, untrained
from gspo_core.starter.lessons import lesson
from gspo_core.starter.untrained import write_untrained

if TYPE_CHECKING:
    from gspo_core.batch import TrainSequence
    from gspo_core.learner import Learner

STAMP_FILE = "demo_model.json"

BATCH_SIZE = 32
NUM_SPELLED = 500
"""Conversations that the tokenizer is trained on."""
MAX_ATTEMPTS = 8
"""Random starts: many do not learn to copy in time, and the last one is taken as it is."""
NEXT_SEED = 1000
PEAK_LR = 3e-3
WARMUP_STEPS = 10


class NotADemoModel(Exception):
    """The directory holds something that this module did not make, so it is not replaced."""


def make_demo_model(
    directory: Path, seed: int = 0, *, taught: Course = demonstrations.COURSE, say: Callable[[str], None] = print
) -> None:
    """Leave the demo model in ``directory``. Returns at once where it is already, made by this recipe and seed."""
    directory = Path(directory).resolve()
    stamp = {"made_by": "examples.demo.model", "seed": seed, "recipe": _recipe(taught)}
    found = _read_stamp(directory)
    if found == stamp:
        return
    if directory.exists() and (found is None or found.get("made_by") != stamp["made_by"]):
        raise NotADemoModel(f"{directory} exists and is not a demo model; name another directory or remove it")
    started = time.monotonic()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch) / "made"
        _make(made, Path(scratch) / "random", seed, taught, say)
        (made / STAMP_FILE).write_text(json.dumps(stamp, indent=2) + "\n")
        if found is not None:
            os.rename(directory, Path(scratch) / "outdated")
        os.rename(made, directory)
    say(f"demo model: ready after {time.monotonic() - started:.0f} s")


def _make(made: Path, untrained: Path, seed: int, taught: Course, say: Callable[[str], None]) -> None:
    """From the first random start that learns to copy in time: others cannot be mended by rewards."""
    with _one_thread():
        for attempt in range(MAX_ATTEMPTS):
            start = untrained / str(attempt)
            learner = _teach(start, seed + attempt * NEXT_SEED, taught, say, is_last=attempt == MAX_ATTEMPTS - 1)
            if learner is not None:
                learner.save_weights(made)
                return


def _teach(directory: Path, seed: int, taught: Course, say: Callable[[str], None], *, is_last: bool) -> Learner | None:
    """The learner after all its lessons; None for one that is given up."""
    school = School(directory, seed, taught)
    parameters = write_untrained(directory, school.codec, seed)
    say(f"demo model: {parameters:,} parameters, warm start begins")
    learner = _learner(directory, seed, taught.num_steps)
    started, losses = time.monotonic(), list[float]()
    for step, batch in enumerate(school.curriculum(), 1):
        losses.append(learner.supervised_step(batch)["supervised/loss"])
        if step % 25 == 0:
            say(f"demo model: step {step}, loss {losses[-1]:.2f}, {time.monotonic() - started:.0f} s")
        loss = sum(losses[-10:]) / 10
        if step == taught.exam_step and loss > taught.exam_loss and not is_last:
            say(f"demo model: it cannot copy yet (loss {loss:.2f} after {step} steps): another random start")
            return None
    return learner


class School:
    """Lessons for one model: demonstrations on training tasks as tokens, in an order that follows from the seed."""

    def __init__(self, directory: Path, seed: int, taught: Course = demonstrations.COURSE) -> None:
        """Trains the tokenizer first and leaves it in ``directory``."""
        self._course = taught
        self._environment = load_environment(taught.environment)
        self._generator = random.Random(seed)
        self._tasks = list(taught.tasks)
        directory.mkdir(parents=True, exist_ok=True)
        conversations = (self._spelling(task) for task in self._tasks[:NUM_SPELLED])
        tokenizer.write_tokenizer(
            directory, conversations, self._environment.tools, words=taught.words, max_vocab_size=taught.max_vocab_size
        )
        self.codec = HermesCodec(load_tokenizer(directory))

    def curriculum(self) -> Iterator[list[TrainSequence]]:
        """The lessons of each step of the warm start."""
        for _ in range(self._course.num_practice):
            yield self.practice(BATCH_SIZE, whole=False)
        for _ in range(self._course.num_whole):
            yield self.practice(BATCH_SIZE)
        for _ in range(self._course.num_noisy):
            yield self.lessons(BATCH_SIZE, self._course.mistakes)

    def practice(self, count: int, *, whole: bool = True) -> list[TrainSequence]:
        """Skills alone. ``whole``: as episodes are, also after errors; else without the system prompt and its tools."""
        return [self._practice(self._task(), whole) for _ in range(count)]

    def lessons(self, count: int, mistakes: Mistakes) -> list[TrainSequence]:
        """Demonstrations as episodes are."""
        return [self._lesson(self._task(), mistakes) for _ in range(count)]

    def _task(self) -> Task:
        return self._generator.choice(self._tasks)

    def _spelling(self, task: Task) -> list[Message]:
        if self._course.spelled_from_practice:
            task, seen, said = self._course.practise(task, self._generator, False)
            said = [*seen, *said]
        else:
            task, said = self._course.demonstrate(task, self._course.mistakes, self._generator)
        return [*self._prompt(task), *said]

    def _practice(self, task: Task, whole: bool) -> TrainSequence:
        task, seen, said = self._course.practise(task, self._generator, whole)
        return self._sequence(task, said, seen, whole=whole)

    def _lesson(self, task: Task, mistakes: Mistakes) -> TrainSequence:
        task, said = self._course.demonstrate(task, mistakes, self._generator)
        return self._sequence(task, said, whole=True)

    def _sequence(
        self, task: Task, said: Sequence[Message], seen: Sequence[Message] = (), *, whole: bool
    ) -> TrainSequence:
        """``seen``: what stands between the question and ``said``, and is not learned."""
        prompt = [*self._prompt(task), *seen]
        return lesson(self.codec, *((prompt, said, self._environment.tools) if whole else (prompt[1:], said)))

    def _prompt(self, task: Task) -> list[Message]:
        assert isinstance(self._environment, PlainEnvironment)
        return first_messages({}, self._course.ask(task), self._environment.system_prompt)


def _learner(directory: Path, seed: int, num_steps: int) -> Learner:
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    optimizer = OptimizerConfig(
        lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.01, schedule="cosine", warmup_steps=WARMUP_STEPS, min_lr_ratio=0.1
    )
    config = LearnerConfig(optimizer=optimizer, total_steps=num_steps)
    return Learner(directory, config, ObjectiveConfig(), seed=seed)


def _recipe(taught: Course) -> str:
    """Changes whenever the code that decides about the model does."""
    digest = hashlib.sha256()
    parts = (course, tokenizer, lessons, untrained)
    for path in (Path(__file__), *(Path(str(part.__file__)) for part in parts), *taught.sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read_stamp(directory: Path) -> dict[str, JSON] | None:
    try:
        stamp = json.loads((directory / STAMP_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return stamp if isinstance(stamp, dict) else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """The order of float additions, and so the model, would otherwise depend on the number of cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.model", description="Make the demo's model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        make_demo_model(given.directory, given.seed)
    except NotADemoModel as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
