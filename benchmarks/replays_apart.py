"""`gspo replay` in processes of its own, for ``benchmarks.replays``: of a directory on several ranks, and of a bundle
that is opened in an empty directory with the package `gspo_core` alone.

Apart means a copy of `gspo_core`, and every other package of this tree cannot be imported; what the library depends on
(torch, transformers, numpy, ...) is that of this environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gspo_core
from gspo_core.replay.bundle import write_bundle
from gspo_core.replay.past import Past

MOST_S = 900.0
ALONE = """import sys
sys.path[:] = [{library!r}, *(one for one in sys.path if one and one != {scripts!r})]
sys.modules |= dict.fromkeys({others!r})
import gspo_core
assert gspo_core.__file__.startswith({library!r}), gspo_core.__file__
from gspo_core.cli import main
sys.exit(main())
"""
OTHERS = ("services", "environments", "examples", "tests", "benchmarks", "redis")


@dataclass(frozen=True)
class Opened:
    """What `gspo replay` said."""

    is_same: bool
    versions: int
    num_replayed: int
    problem: str = ""


def replay_apart(folder: Path, step: int, num_ranks: int) -> Opened:
    return _ask([str(Path(sys.executable).with_name("gspo"))], f"{folder}@{step}", num_ranks, Path.cwd(), ())


def replay_bundle(past: Past, step: int, num_ranks: int) -> Opened:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        library, empty, bundle = place / "library", place / "empty", place / "step.gspo"
        empty.mkdir()
        shutil.copytree(Path(gspo_core.__file__).parent, library / "gspo_core", ignore=shutil.ignore_patterns("*.pyc"))
        command = place / "gspo.py"
        command.write_text(ALONE.format(library=str(library), scripts=str(place), others=OTHERS))
        write_bundle(past, past.folder.name, step, step, bundle)
        # The base model is not carried: it is brought from elsewhere than the job says.
        model = place / "model"
        model.symlink_to(Path(past.spec.model).resolve())
        found = _ask([sys.executable, str(command)], f"{bundle}@{step}", num_ranks, empty, ("--model", str(model)))
        assert not list(empty.iterdir())
    return found


def _ask(gspo: list[str], where: str, num_ranks: int, cwd: Path, more: Sequence[str]) -> Opened:
    argv = [*gspo, "replay", where, "--json", *more]
    if num_ranks > 1:
        options = ["--no-python", "--standalone", "--nproc-per-node", str(num_ranks)]
        argv = [sys.executable, "-m", "torch.distributed.run", *options, *argv]
    # The number of threads is not said: a replay takes it from the log.
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if num_ranks > 1:
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=cwd, env=variables, capture_output=True, text=True, timeout=MOST_S, check=False)
    if not done.stdout.startswith("{"):
        return Opened(is_same=False, versions=0, num_replayed=0, problem=done.stderr.strip()[-300:])
    answer = json.loads(done.stdout)
    versions = sum(len(step["versions"]) for step in answer["steps"])
    is_same = done.returncode == 0 and answer["is_same"] and versions > 0
    problem = "" if is_same else done.stderr.strip()[-300:]
    return Opened(is_same=is_same, versions=versions, num_replayed=answer["num_replayed"], problem=problem)
