"""Judges the environments of a running job: ill ones are waited for, hopeless ones end the job and free its trainer.

Rule: an environment that ever brought an episode to its end is never hopeless, because what fails later (a network, a
server) may come back. One that never did is hopeless once it has failed for the time that a start may take. One that
shows an image is hopeless at once: only episodes that are not shown it would be trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from gspo_core.bounds import reaches
from gspo_core.environment_contract import IMAGES
from gspo_core.spec import JobSpec
from services.state.fleet_records import WorkerRecord
from services.trainer.telling.failure import JobFailure

# Not less, however short a start may be: a server behind an environment is restarted within this time.
MIN_PATIENCE_S = 30.0
# While only some workers complain: the others may be about to show that it works.
PATIENCE_FACTOR = 5


class UnhealthyEnvironments:
    """The environments of one job. ``proven``: those that brought an episode to its end. ``has_trained``: an earlier
    step proves all of them."""

    def __init__(
        self,
        spec: JobSpec,
        proven: Callable[[], set[int]],
        has_trained: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._proven, self._has_trained = spec, proven, has_trained
        self._clock = clock
        self._ill_since: dict[str, float] = {}

    def judge(self, job: str, workers: Sequence[WorkerRecord]) -> None:
        """Raises JobFailure if one of them is hopeless. Call it every few seconds while the job runs."""
        serving = [one for one in workers if job in one.jobs]
        complaints = [said for one in serving for said in one.ill_environments.get(job, {}).items()]
        errors = {name for name, _ in complaints}
        now = self._clock()
        self._ill_since = {name: self._ill_since.get(name, now) for name in errors}
        proven = self._proven()  # at every call, since what it reads accumulates
        for name, error in complaints:
            if error.startswith(f"{IMAGES}: "):
                raise JobFailure("images_unsupported", f"{name}: {error.removeprefix(f'{IMAGES}: ')}")
        if not errors or self._has_trained():
            return
        for name in errors:
            places = {place for place, one in enumerate(self._spec.environments) if one.ref == name}
            if places & proven:
                continue
            ill_s = now - self._ill_since[name]
            if reaches(ill_s, self._patience_s(job, name, places, serving), "the time that an environment has failed"):
                raise JobFailure(
                    "environment_failed",
                    f"no episode of {name} ever came to its end, and for {ill_s:.0f} s every attempt has failed: "
                    f"{complaint_of(job, workers)}",
                )

    def _patience_s(self, job: str, name: str, places: Iterable[int], serving: Sequence[WorkerRecord]) -> float:
        start_s = max((self._spec.episode_limits(place).reset_timeout_s for place in places), default=0.0)
        patience_s = max(MIN_PATIENCE_S, start_s)
        hopeful = [one for one in serving if one.num_episodes and name not in one.ill_environments.get(job, {})]
        return PATIENCE_FACTOR * patience_s if hopeful else patience_s


def fails_everywhere(job: str, workers: Iterable[WorkerRecord]) -> bool:
    """Whether every worker that plays ``job`` has one of its environments in quarantine."""
    serving = [one for one in workers if job in one.jobs]
    return bool(serving) and all(one.ill_environments.get(job) for one in serving)


def complaint_of(job: str, workers: Iterable[WorkerRecord]) -> str | None:
    """The first complaint by a worker about ``job``."""
    serving = [one for one in workers if job in one.jobs]
    complaining = [(one.id, ill) for one in serving if (ill := one.ill_environments.get(job))]
    if not complaining:
        return None
    worker, ill = complaining[0]
    environment, error = next(iter(ill.items()))
    return f"{environment} fails on {len(complaining)} of {len(serving)} workers; {worker}: {error}"
