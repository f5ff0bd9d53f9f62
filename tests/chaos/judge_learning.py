"""Is what was learned a function of the logs? Every lineage is trained again, from the model that it began with, and
must give the published weights of every step and the last checkpoint, bit for bit; what an epoch published that died
must be the weights of the last step that it shares with the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from services.trainer.building import make_learner
from tests.chaos.evidence import JobEvidence, Place
from tests.chaos.judge_weights import digests

SHARD = "rank-00000.safetensors"


def weights_follow_from_the_logs(job: JobEvidence) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        weights, state = learned_again(job, Path(folder))
    yield from weights_differ(job, weights)
    last = job.newest_checkpoint
    if last is None:
        if not job.is_given_up:
            yield "it has no checkpoint"
    elif not _is_damaged(job, last) and digests(last / "learner")[SHARD] != state.get(_place(last)[1]):
        yield f"{last.name} holds something else than its logs lead to"


def learned_again(job: JobEvidence, folder: Path) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
    """Step -> digests of the files that are published for it; and of the learner's state where that is kept."""
    learner, lineage, tuning = make_learner(job.spec), Lineage(), Tuning(job.spec)
    kept = _place(job.newest_checkpoint)[1] if job.newest_checkpoint else -1
    weights, state = {}, {}
    rows = [(0, None), *((place[1], batch) for place, batch in sorted(job.batches.items(), key=lambda one: one[0][1]))]
    for step, batch in rows:
        if batch is not None:
            train_again(learner, lineage, batch, tuning)
        learner.save_weights(folder / f"w{step}")
        weights[step] = digests(folder / f"w{step}")
        if step == kept:
            learner.save_state(folder / "state")
            state[step] = digests(folder / "state")[SHARD]
    return weights, state


def weights_differ(job: JobEvidence, weights: dict[int, dict[str, str]]) -> Iterator[str]:
    for version in job.versions.values():
        epoch, step = version.place
        again = weights.get(job.shared(version.place))
        # What is published beyond the lineage is another check's finding.
        if step == job.shared(version.place) and version.files != again:
            yield f"version {version.number} (epoch {epoch} step {step}) holds other weights than its logs lead to"


def _place(checkpoint: Path) -> Place:
    epoch, _, step = checkpoint.name.removeprefix("ep").partition("-step")
    return int(epoch), int(step)


def _is_damaged(job: JobEvidence, checkpoint: Path) -> bool:
    return any(hit.get("detail", "").startswith(f"checkpoints/{checkpoint.name}/") for hit in job.hits)
