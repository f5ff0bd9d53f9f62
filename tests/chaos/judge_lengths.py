"""Is what was trained as long as what was said? Whatever faults took away or had sampled again must not have been the
longer or the shorter part.

Lengths of what is gone are known to nobody, but what a turn may say is: after a prompt one of a few turns follows, all
equally likely (``talk``). So the trained turns are compared with what may have followed each prompt. Where nothing
chooses among them the sum of the differences is a martingale with known variance and bounded steps, and Freedman's
inequality bounds it: a run that is sound fails with a probability below ``FALSE_ALARM``.

Two things are allowed for. Jobs that drop what is too old prefer short episodes, as they say, and are left out. And
what a death takes is what was under way, of which the long part is under way for longer: ``TOLERANCE`` of the mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.evidence import Evidence, JobEvidence
from tests.chaos.judge_tokens import all_episodes, turns
from tests.chaos.talk import Talker

FALSE_ALARM = 1e-7
TOLERANCE = 0.05
MAX_EPISODES = 1000
"""Of each job, drawn at random."""
MIN_TURNS = 200
"""Fewer say nothing."""


@dataclass
class Lengths:
    num_turns: int = 0
    total: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    widest: float = 0.0
    """The farthest that a turn can be from what is expected of it."""

    def add(self, length: int, possible: list[int]) -> None:
        mean = sum(possible) / len(possible)
        self.num_turns += 1
        self.total += length
        self.expected += mean
        self.variance += sum((one - mean) ** 2 for one in possible) / len(possible)
        self.widest = max(self.widest, *(abs(one - mean) for one in possible))

    @property
    def shift(self) -> float:
        """Of the mean, as a share of what is expected."""
        return (self.total - self.expected) / self.expected

    @property
    def noticed(self) -> float:
        """From what shift on the check fails; twice that is noticed with the same certainty as a false alarm is not."""
        weight = math.log(2 / FALSE_ALARM)
        step = weight * self.widest / 3
        return (step + math.sqrt(step**2 + 2 * weight * self.variance)) / self.expected + TOLERANCE


def lengths(jobs: list[JobEvidence], talker: Talker, *, only_again: bool) -> Lengths:
    """``only_again``: of the episodes that were begun anew."""
    found = Lengths()
    for job in jobs:
        if job.spec.rollout.on_stale == "drop":
            continue
        trained = [one for _, one in all_episodes(job) if one.branches]
        episodes = [one for one in trained if one.attempt or not only_again]
        for trajectory in random.Random(job.id).sample(episodes, min(MAX_EPISODES, len(episodes))):
            (branch,) = trajectory.branches
            ids = branch.token_ids.tolist()
            for begin, _ in turns(branch.action_mask.tolist()):
                possible = talker.possible_lengths(ids[:begin])
                if ids[begin] in possible:  # else no engine said it, which another check finds
                    found.add(possible[ids[begin]], list(possible.values()))
    return found


def lengths_are_not_chosen(evidence: Evidence, talker: Talker) -> Iterator[str]:
    for what, only_again in (("of what was trained", False), ("of what was sampled again", True)):
        found = lengths(evidence.jobs, talker, only_again=only_again)
        if found.num_turns >= MIN_TURNS and abs(found.shift) > found.noticed:
            yield (
                f"{what} the {found.num_turns} turns have {found.total / found.num_turns:.1f} tokens, "
                f"{found.expected / found.num_turns:.1f} were to be expected ({100 * found.shift:+.1f} %)"
            )


def told(evidence: Evidence, talker: Talker) -> str:
    """What was found, and what would have been."""
    parts = []
    for what, only_again in (("trained", False), ("sampled again", True)):
        found = lengths(evidence.jobs, talker, only_again=only_again)
        if found.num_turns < MIN_TURNS:
            parts.append(f"{what}: {found.num_turns} turns, too few to say anything")
        else:
            noticed = f"a shift of {100 * found.noticed:.1f} % fails"
            parts.append(f"{what}: {found.num_turns} turns, {100 * found.shift:+.1f} % off ({noticed})")
    return "; ".join(parts)
