"""Is everything that was lost lost for its reason? A spoiled record costs one episode, a turned bit one group, a
spoiled group the queue, which is played anew; nothing else costs anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.evidence import Evidence, JobEvidence

UNREADABLE = "cannot be read"
# What agents play in, all of a gateway at once.
KILLS_OF_HOSTS = ("kill hosts of agents", "kill hosts in a stream")


def losses_have_their_reason(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    turned, spoiled = _groups(job, "turn bit"), _groups(job, "spoil episode")
    letters = [one for one in evidence.samples if one["kind"] == "dead letter" and one["job"] == job.id]
    given_up = {one["group"] for one in letters if UNREADABLE not in one["reason"]}
    if unfounded := sorted({one["group"] for one in letters} - given_up - spoiled):
        yield f"records of episodes could not be read that nobody had spoiled, of the groups {unfounded}"
    explained = {
        "dropped_stale": None if job.spec.rollout.on_stale == "drop" else set[int](),
        "dropped_unreadable": turned,
        "dropped_partial": None if _may_have_used_up_retries(job) else spoiled | given_up,
    }
    for (_, step), batch in job.batches.items():
        for reason, groups in batch.extra["dropped"].items():
            allowed = explained.get(reason, set())
            if allowed is not None and (wrong := sorted(set(groups) - allowed)):
                yield f"step {step}: {reason} without a reason: {wrong}"
        for group in batch.groups:
            if len(group.trajectories) < group.size and group.group not in spoiled | given_up:
                yield f"step {step}: of the {group.size} episodes of group {group.group} some are missing"
    if not _groups(job, "spoil group") and (lost := _num_lost_with_the_queue(evidence, job)):
        yield f"its queue was emptied for damage that nobody had done ({lost} groups)"


def _may_have_used_up_retries(job: JobEvidence) -> bool:
    """An agent's episode is not charged for the first kill of its process from outside. From then on it sits alone, and
    is charged for each."""
    kills = [hit for hit in job.hits if hit["kind"] in KILLS_OF_HOSTS]
    places = range(len(job.spec.environments)) if kills else ()
    return bool(kills) and len(kills) >= 2 + min(job.spec.episode_limits(place).retries for place in places)


def _groups(job: JobEvidence, kind: str) -> set[int]:
    return {hit["group"] for hit in job.hits if hit["kind"] == kind and "group" in hit}


def _num_lost_with_the_queue(evidence: Evidence, job: JobEvidence) -> int:
    samples = (one for one in evidence.samples if one["kind"] == "counters" and one["job"] == job.id)
    return max((one["counters"].get("dropped_queue_damaged", 0) for one in samples), default=0)
