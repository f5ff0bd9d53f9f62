"""What the bits of a step depend on beside its data: device, threads, ranks and torch.

The rule: it is written down with each step, and a step that is trained again is computed alike where this machine can;
where it cannot, the reason is said beforehand instead of a mystery afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gspo_core.learner.ranks import Ranks
from gspo_core.log.batches import Computed
from gspo_core.spec import JobSpec


def device_here(spec: JobSpec) -> str:
    """Where a job is computed on this machine."""
    return "cuda" if spec.resources.device != "cpu" and torch.cuda.is_available() else "cpu"


def computing(spec: JobSpec) -> Computed:
    """What computes the steps of a job in this process."""
    return {
        "device": device_here(spec),
        "threads": torch.get_num_threads(),
        "num_ranks": Ranks.current().num_ranks,
        "torch": str(torch.__version__),
    }


def compute_as(logged: Computed | None, spec: JobSpec) -> Iterator[str]:
    """Take the number of threads that a step was trained with; yields what cannot be as it was then."""
    if logged is None:
        yield "its log does not say what computed it (a release before wrote it): threads are those of this process"
        return
    if torch.get_num_threads() != logged["threads"]:
        torch.set_num_threads(logged["threads"])
    here = computing(spec)
    names = {"device": "device", "num_ranks": "number of ranks", "torch": "version of torch"}
    for key, name in names.items():
        if here[key] != logged[key]:  # type: ignore[literal-required]
            yield f"the {name} was {logged[key]} and is {here[key]} here: bits may differ"  # type: ignore[literal-required]
