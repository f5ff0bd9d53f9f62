"""Is what was learned a function of the logs? Every lineage is trained again, from the model that it began with, and
must give the published weights of every step and the last checkpoint, bit for bit.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gspo_core.log.lineage import Lineage
from services.trainer.building import make_learner
from services.trainer.groups.step_settings import Tuning
from services.trainer.past.replay import train_again
from tests.chaos.evidence import JobEvidence, Place

WEIGHTS, SHARD = "model.safetensors", "rank-00000.safetensors"


def weights_follow_from_the_logs(job: JobEvidence) -> Iterator[str]:
    published: dict[Place, list[tuple[int, str]]] = {}
    for version in job.versions.values():
        published.setdefault(version.place, []).append((version.number, version.files[WEIGHTS]))
    learner, lineage, tuning = make_learner(job.spec), Lineage(), Tuning(job.spec)
    reached = job.reach((max(job.forks), 1 << 60))
    with tempfile.TemporaryDirectory() as folder:
        for place, batch in sorted(job.batches.items(), key=lambda one: one[0][1]):
            train_again(learner, lineage, batch, tuning)
            step = place[1]
            learner.save_weights(Path(folder) / f"w{step}")
            digest = _sha256(Path(folder) / f"w{step}" / WEIGHTS)
            for epoch in reached:
                for number, theirs in published.get((epoch, step), []):
                    if step <= reached[epoch] and theirs != digest:
                        yield f"version {number} (step {step}) holds other weights than its logs lead to"
        learner.save_state(Path(folder) / "state")
        last = job.newest_checkpoint
        if last is None:
            yield "it has no checkpoint"
        elif _sha256(last / "learner" / SHARD) != _sha256(Path(folder) / "state" / SHARD):
            yield f"{last.name} holds something else than its logs lead to"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
