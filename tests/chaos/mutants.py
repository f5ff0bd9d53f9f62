"""``python -m tests.chaos.mutants [NAME ...]``: the run and its oracle can fail. Each known way to build this wrongly
is built here, in a copy of the tree with one line changed, and must not get through a short run.

The oracle that judges is that of the unchanged tree. If the text that is to be changed is not there any more, that is
an error here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gate.chaos import NO_FINDING

ROOT = Path(__file__).resolve().parents[2]
AGENTS = Path(os.environ.get("GSPO_TEST_AGENTS", ROOT / ".make" / "agents")).absolute()
"""Of mutants that agents notice: `make test-agents` installs them."""
COPIED = ("gspo_core", "services", "environments", "examples", "tests", "benchmarks")


NOTICED = ("oracle: ", "chaos: FAILED")
ALL_IS_WELL = "all is well"
"""Then a run may still fail, because it was too short for what it promised."""


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    flags: tuple[str, ...]


def short(
    kinds: str,
    *,
    faults: int = 16,
    minutes: float = 0.5,
    steps: int = 16,
    least_jobs: int = 2,
    players: str = "worlds",
) -> tuple[str, ...]:
    return (
        *("--kinds", kinds, "--faults", str(faults), "--minutes", str(minutes), "--steps", str(steps), "--seed", "1"),
        *("--least-jobs", str(least_jobs), "--players", players),
    )


MUTANTS = {
    "a key makes a job each time": Mutant(
        "services/state/job_table.py",
        "key_digest = None if idempotency_key is None else _digest_of_key(idempotency_key)",
        "key_digest = None",
        short("lose reply", faults=2),
    ),
    "one step too many is admitted": Mutant(
        "gspo_core/staleness.py",
        "return max(0, (max_staleness + 1) * groups_per_step - occupied)",
        "return max(0, (max_staleness + 2) * groups_per_step - occupied)",
        short("lose reply", faults=4, minutes=0.1, steps=6),
    ),
    "every token is young": Mutant(
        "services/trainer/groups/staleness.py",
        "{str(version): int(age) for",
        "{str(version): 0 * int(age) for",
        short("kill worker", faults=4, minutes=0.2, steps=8),
    ),
    "an answer has the version of its last token": Mutant(
        "services/episodes/tree.py",
        "for span in sampled.spans:",
        "for span in (Span(one.start, one.end, sampled.spans[-1].version) for one in sampled.spans):",
        short("cut engine"),
    ),
    "a takeover forgets what was logged after the checkpoint": Mutant(
        "services/trainer/run.py",
        "begin_epoch, epoch, found.reached)",
        "begin_epoch, epoch, found.saved)",
        short("kill trainer", faults=6),
    ),
    "a step that is trained again does not settle its groups": Mutant(
        "gspo_core/log/steps.py",
        "lineage.settle([*(group.group for group in batch.groups), *dropped])",
        "lineage.settle(dropped)",
        short("kill trainer", faults=6),
    ),
    "who has lost the job is still obeyed": Mutant(
        "services/state/lua/library.lua",
        'return token ~= "" and redis.call("HGET", K.trainer, "token") == token',
        "return true",
        short("stop trainer", faults=8),
    ),
    "each pass over the data has the same order": Mutant(
        "services/trainer/groups/tasks.py",
        "np.random.default_rng((seed, environment, lap))",
        "np.random.default_rng((seed, environment, 0))",
        short("lose reply", faults=4, minutes=0.1, steps=24),
    ),
    "an engine is given the oldest weights under the newest name": Mutant(
        "services/trainer/fleet/engine_switch.py",
        "load = transport.load(engine.client, path, label,",
        'load = transport.load(engine.client, min(path.parent.glob("v*"), key=lambda one: int(one.name[1:])), label,',
        short("lose reply", faults=4, minutes=0.1, steps=8),
    ),
    "a step that is trained again has the settings of now": Mutant(
        "gspo_core/log/steps.py",
        'tuning.recall(learner, batch.extra.get("settings", {}))',
        "pass",
        short("kill trainer,change settings", faults=16, steps=24),
    ),
    "changed settings are never taken": Mutant(
        "services/trainer/run.py",
        "if tuning.version == job.settings_version:",
        "if tuning.version <= job.settings_version:",
        short("change settings", faults=8),
    ),
    "who is held goes on": Mutant(
        "services/trainer/telling/status.py",
        "if await self._desired() is not DesiredState.PAUSED:",
        "if True:",
        short("hold job", faults=8),
    ),
    "what an engine says of its weights is believed": Mutant(
        "services/workers/engines.py",
        "if unknown := sorted(set(versions) - self._steps.keys()):",
        "if unknown := []:",
        short("lie: no version", faults=8),
    ),
    "a segment is believed without its checksum": Mutant(
        "gspo_core/codec.py",
        "if crc32(memoryview(data)[_CHECKED_FROM:]) != crc:",
        "if False:",
        short("turn bit", faults=40),
    ),
    "what takes long is asked again": Mutant(
        "services/workers/engines.py",
        "if generation is not None and generation.output_ids:",
        "if generation is not None and generation.output_ids and (len(generation.output_ids) < 8 or asked % 1 < 0.3):",
        short("lose reply", faults=4, minutes=0.1, steps=24, least_jobs=3),
    ),
    "a reward counts each time that it is posted": Mutant(
        "services/episodes/snapshots.py",
        "known = self._by_token.get(reward.token, reward)",
        "known, self._by_token = reward, {}",
        short("cut agents", faults=2, minutes=0.1, steps=4, least_jobs=1, players="agents"),
    ),
    "who asks again is sampled for again": Mutant(
        "services/gateway/agent/episode.py",
        "if ask.is_retry and equal:",
        "if False:",
        short("lose agent's answer", faults=24, steps=12, least_jobs=1, players="agents"),
    ),
    "an episode that cannot be read is nobody's": Mutant(
        "services/state/lua/queue_records.lua",
        "return as_episode(packed) or bury(K, episode)",
        "return as_episode(packed)",
        short("spoil episode", faults=8),
    ),
}


def main() -> int:
    names = sys.argv[1:] or list(MUTANTS)
    survived = []
    for name in names:
        began = time.monotonic()
        said = run(MUTANTS[name])
        print(f"{'noticed' if said else 'SURVIVED'} after {time.monotonic() - began:.0f} s: {name}", flush=True)
        if said:
            print(f"    {said}", flush=True)
        else:
            survived.append(name)
    return 1 if survived else 0


def run(mutant: Mutant) -> str:
    """What was said against it; empty: nothing."""
    with tempfile.TemporaryDirectory(prefix="gspo-mutant-") as folder:
        tree = Path(folder) / "tree"
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        change(tree / mutant.file, mutant.old, mutant.new)
        command = [sys.executable, "-m", "tests.chaos", *mutant.flags, "--work", f"{folder}/run"]
        ended = subprocess.run(
            [*command, "--oracle-root", str(ROOT), "--settle-s", "240"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "GSPO_TEST_AGENTS": str(AGENTS)},
            capture_output=True,
            text=True,
            check=False,
        )
    said = [line for line in ended.stdout.splitlines() if line.startswith(NOTICED) and NO_FINDING not in line]
    if ended.returncode == 0 or ALL_IS_WELL in ended.stdout:
        return ""
    if not said:
        raise RuntimeError(f"the run itself is broken:\n{ended.stdout}\n{ended.stderr}")
    return said[0]


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"the code has changed: {old!r} is {text.count(old)} times in {path.name}")
    path.write_text(text.replace(old, new))


if __name__ == "__main__":
    sys.exit(main())
