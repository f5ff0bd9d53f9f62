"""Of each job: every group is trained once or dropped for a reason, versions and checkpoints only go forward, nothing
is trained that is too old, and no more was started than may be. Each check yields what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from services.files.batch_log import LoggedBatch
from tests.chaos.evidence import Evidence, JobEvidence, Place
from tests.chaos.lateness import Late


def jobs_are_over(job: JobEvidence) -> Iterator[str]:
    if job.is_given_up:
        return
    if (status := job.status.get("status")) != "succeeded":
        told = f"it is {status}: {job.status}"
        yield told if status in ("failed", "cancelled") else Late(told)
    # Who has come to the end before the request did may succeed all the same.
    elif any(act["act"] == "cancelled" for act in job.acts) and len(job.lineage) < job.spec.steps:
        yield "it was to be cancelled, to which the API had said yes"


def steps_are_whole(job: JobEvidence) -> Iterator[str]:
    steps = [step for _, step in job.lineage]
    last = len(steps) if job.is_given_up else job.spec.steps
    if steps != list(range(1, last + 1)):
        yield f"the steps of its lineage are {steps}, not 1 to {last}"


def groups_are_settled_once(job: JobEvidence) -> Iterator[str]:
    """Conservation and exactly-once: what was dispatched is trained or dropped, and nothing twice."""
    trained = Counter(group.group for batch in job.batches.values() for group in batch.groups)
    dropped = Counter(
        group for batch in job.batches.values() for groups in batch.extra["dropped"].values() for group in groups
    )
    unnamed = {reason for batch in job.batches.values() for reason in batch.extra["dropped"]} - _REASONS
    if unnamed:
        yield f"groups were dropped for unknown reasons: {sorted(unnamed)}"
    if doubled := sorted(group for group, count in trained.items() if count > 1):
        yield f"trained twice: {doubled}"
    if both := sorted(trained.keys() & dropped.keys()):
        yield f"trained and dropped: {both}"
    last = max(job.batches, key=lambda place: place[1], default=None)
    num_dispatched = job.batches[last].extra["num_dispatched"] if last else 0
    if not job.is_given_up and (lost := sorted(set(range(num_dispatched)) - trained.keys() - dropped.keys())):
        yield f"dispatched, and neither trained nor dropped: {lost}"
    if foreign := sorted((trained.keys() | dropped.keys()) - set(range(num_dispatched))):
        yield f"trained or dropped without having been dispatched: {foreign}"


_REASONS = {"dropped_stale", "dropped_unreadable", "dropped_partial", "dropped_mismatch", "dropped_no_reward"}


def versions_go_forward(job: JobEvidence) -> Iterator[str]:
    """A number names one set of weights, and a later one stands for a later place in the history."""
    places = [version.place for _, version in sorted(job.versions.items())]
    for before, after in pairwise(places):
        if after < before:
            yield f"a version of epoch {after[0]} step {after[1]} came after one of epoch {before[0]} step {before[1]}"
    for version in job.versions.values():
        epoch, step = version.place
        if step > job.shared(version.place):
            yield f"version {version.number} (epoch {epoch} step {step}) was published and is no part of the lineage"


def nothing_of_a_dead_epoch_is_trained(job: JobEvidence) -> Iterator[str]:
    """What a trainer published beyond the place where its successor forked off has sampled nothing that counts; and
    what was sampled is what the log says that it was."""
    for (_, step), batch in job.batches.items():
        sampled = {one.version for group in batch.groups for episode in group.trajectories for one in episode.segments}
        logged = {int(number) for number in batch.extra["staleness"]}
        if sampled != logged:
            yield f"step {step} holds tokens of the versions {sorted(sampled)} and its log speaks of {sorted(logged)}"
        for number in sorted(sampled & job.versions.keys()):
            place = job.versions[number].place
            if place[1] > job.shared(place):
                yield f"step {step} was trained on version {number}, which epoch {place[0]} published and took with it"


def nothing_is_too_old(job: JobEvidence) -> Iterator[str]:
    """The ages that were trained with are those that the versions have; where old groups are dropped none is left."""
    for (epoch, step), batch in job.batches.items():
        here = (epoch, step - 1)
        # The end of an episode of which nothing was sampled names the first version, however old that is.
        pieces = [one for group in batch.groups for episode in group.trajectories for one in episode.segments]
        sampled = {one.version for one in pieces if one.num_actions}
        for number, age in batch.extra["staleness"].items():
            version = job.versions.get(int(number))
            if version is None:
                yield f"step {step} was trained on version {number}, which was never published"
                continue
            true_age = _age(job, version.place, here)
            if age != true_age:
                yield f"step {step} took version {number} for {age} steps old, it is {true_age}"
            is_sampled = int(number) in sampled
            if job.spec.rollout.on_stale == "drop" and is_sampled and true_age > job.spec.rollout.staleness_cap:
                yield f"step {step} was trained on version {number}, {true_age} steps old"
            if version.place > here and version.place[0] >= epoch:
                yield f"step {step} was trained on version {number} of its own future"


def _age(job: JobEvidence, version: Place, here: Place) -> int:
    reached = job.reach(here)
    epoch, step = version
    while epoch not in reached:
        parent = job.forks.get(epoch, (0, 0))
        epoch, step = parent[0], min(step, parent[1])
        if step == 0:
            break
    return here[1] - min(step, reached.get(epoch, 0))


def admission_is_paced(job: JobEvidence) -> Iterator[str]:
    dropped = 0
    allowed = job.spec.rollout.max_staleness + 1
    for (_, step), batch in sorted(job.batches.items(), key=lambda one: one[0][1]):
        dropped += sum(len(groups) for groups in batch.extra["dropped"].values())
        most = (step - 1 + allowed) * job.spec.groups_per_step + dropped
        if batch.extra["num_dispatched"] > most:
            yield f"before step {step} {batch.extra['num_dispatched']} groups had been started, at most {most} may be"


def attempts_are_not_mixed(job: JobEvidence) -> Iterator[str]:
    for (_, step), batch in job.batches.items():
        for group in batch.groups:
            yield from (f"step {step}: {problem}" for problem in _mixed(job, batch, group.group))


def _mixed(job: JobEvidence, batch: LoggedBatch, number: int) -> Iterator[str]:
    group = next(one for one in batch.groups if one.group == number)
    if len({trajectory.key.member for trajectory in group}) != len(group.trajectories):
        yield f"group {number} holds a member twice"
    for trajectory in group:
        if {segment.key.group for segment in trajectory.segments} != {number}:
            yield f"group {number} holds segments of another one"
        if len({segment.attempt for segment in trajectory.segments}) != 1:
            yield f"{trajectory.key} mixes attempts"
        if [segment.index for segment in trajectory.segments] != list(range(len(trajectory.segments))):
            yield f"{trajectory.key} lacks segments or has some twice"


def checkpoints_go_forward(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """As they were seen appear: the newest one that counts never stands for less than the one before."""
    newest: Place = (0, 0)
    hits = [fault for fault in evidence.faults if fault.get("detail", "").startswith("checkpoints/")]
    damaged = {fault["detail"].split("/")[1] for fault in hits if job.id in fault["jobs"]}
    # Where the newest one was damaged the row begins anew: who goes on from an older one saves on its way.
    damages = sorted(fault["at"] for fault in hits if job.id in fault["jobs"])
    for sample in evidence.samples:
        if sample["kind"] != "checkpoints" or sample["job"] != job.id:
            continue
        while damages and damages[0] < sample["at"]:
            damages.pop(0)
            newest = (0, 0)
        living = _living(job, [name for name in sample["names"] if name not in damaged])
        if not living:
            continue
        if max(living)[1] < newest[1]:
            yield f"its newest checkpoint was of step {newest[1]} and then of step {max(living)[1]}"
        newest = max(living)


def _living(job: JobEvidence, names: list[str]) -> list[Place]:
    """Of the checkpoints among ``names``, those that count for the newest epoch among them."""
    begun = [int(name[5:11]) for name in names if name.startswith("epoch")]
    reached = job.reach((max(begun), 1 << 60)) if begun else {}
    found = [name.removeprefix("ep").split("-step") for name in names if name.startswith("ep0")]
    return [(int(epoch), int(step)) for epoch, step in found if int(step) <= reached.get(int(epoch), -1)]


def books_are_balanced(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """The counters, at every moment that they were looked at."""
    for sample in evidence.samples:
        if sample["kind"] == "counters" and sample["job"] == job.id:
            counts = dict(sample["counters"])
            if counts.pop("dispatched") != sum(counts.values()):
                yield f"the counters do not add up: {sample['counters']}"


def epochs_keep_what_was_published(job: JobEvidence) -> Iterator[str]:
    """Who takes a job over goes on from at least the last step whose weights were published."""
    for epoch, (parent, step) in job.forks.items():
        published = [one.place for one in job.versions.values() if one.place[0] < epoch]
        reached = job.reach((parent, step))
        beyond = [place for place in published if place[0] in reached and place[1] > reached[place[0]]]
        if beyond:
            yield f"epoch {epoch} went on from step {step} although step {max(beyond)[1]} was published"
