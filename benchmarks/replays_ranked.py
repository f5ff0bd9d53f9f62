"""Plays jobs that trainers of several ranks train, for ``benchmarks.replays``: all weights, low-rank additions and a
mixture of experts. ``python -m benchmarks.replays_ranked FOLDER [--ranks 2] [--steps 12]`` leaves them in
FOLDER/dense/data and FOLDER/mixture/data.

Real processes with scripted engines, as in ``benchmarks.replays_played``; the trainer is ``services.trainer`` under
torchrun over gloo, and in the middle of each job one of its ranks is killed, so that all are started again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.replays_played import ENDED_S, is_over, spec_of, write_mixture
from services.process.ports import free_port
from tests.chaos.model import write_model
from tests.releases import installation
from tests.releases.installation import API, ENGINE, TRAINER, WORKER, Installation, installed
from tests.releases.make import WORLD

MORE = {"checkpoint_every": 4}
MODELS: tuple[tuple[str, Callable[[Path], None], tuple[dict[str, Any], ...]], ...] = (
    ("dense", write_model, ({}, {"lora": {"rank": 4, "alpha": 8.0}})),
    ("mixture", write_mixture, ({},)),
)
"""With the settings of the learner of each job."""


def play(folder: Path, num_ranks: int, steps: int) -> None:
    """One installation after another: an engine serves models of one kind."""
    for name, write, learners in MODELS:
        home = folder / name
        home.mkdir(parents=True)
        write(home / "model")
        (home / "world.py").write_text(WORLD)
        with installed(home) as here, trainer_of(num_ranks):
            here.start(ENGINE, API, TRAINER, WORKER)
            try:
                for seed, learner in enumerate(learners):
                    job = here.post(spec_of(home / "model", home / "world.py", steps, learner, seed) | MORE)
                    train(here, job, steps)
                    print(f"{job}: {num_ranks} ranks, {name}, {learner}, {here.job(job)['step']} steps", flush=True)
            finally:
                os.kill(here.pid(TRAINER), signal.SIGTERM)  # a launcher that is killed leaves its ranks behind
                here.status(TRAINER)


def train(here: Installation, job: str, steps: int) -> None:
    here.wait_for("half of the steps", lambda: here.job(job)["step"] >= steps // 2, ENDED_S)
    os.kill(ranks_of(here.pid(TRAINER))[-1], signal.SIGKILL)
    here.wait_for("the end", lambda: is_over(here, job), ENDED_S)


@contextlib.contextmanager
def trainer_of(num_ranks: int) -> Iterator[None]:
    """Trainers that are started meanwhile have so many ranks."""
    alone = installation.COMMANDS[TRAINER]
    options = ["--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options += ["--max-restarts", "99", "--monitor-interval", "0.2", "--module"]
    installation.COMMANDS[TRAINER] = ("-m", "torch.distributed.run", *options, "services.trainer")
    try:
        yield
    finally:
        installation.COMMANDS[TRAINER] = alone


def ranks_of(launcher: int) -> list[int]:
    """Its processes."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="must not exist")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    play(given.folder.resolve(), given.ranks, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
