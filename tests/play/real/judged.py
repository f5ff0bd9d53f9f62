"""Judges what a real play has logged: against what the engine answered, what its weights say, and what was asked.

Rule: nothing of the gateway is believed. What the engine sampled was read on its way, log-probs are computed again by
transformers from the published weights, and which requests go on from which the requests alone tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from examples.demo.provenance import TOLERANCE, differences
from gspo_core.types import Asked, Branch, Segment, Trajectory
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from tests.play.observed import goes_on, observed
from tests.play.packages import PACKAGES
from tests.play.real.passage import Sample, Samples, name_of
from tests.play.run import qwen_codec
from tests.play.stage import Part
from tests.play.wire import marks_in


@dataclass
class Stored:
    """One branch of an episode, as it is stored, untrained turns included."""

    ids: NDArray[np.int32]
    acts: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: NDArray[np.int32]

    def said(self) -> Iterator[tuple[int, int]]:
        """Where each turn was sampled."""
        ends = np.flatnonzero(np.diff(np.concatenate(([0], self.acts.astype(np.int8), [0]))))
        yield from zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True)


def stored(record: Sequence[Segment]) -> dict[int, Stored]:
    by_branch: dict[int, list[Segment]] = defaultdict(list)
    for segment in record:
        by_branch[segment.branch].append(segment)
    found = {}
    for number, pieces in by_branch.items():
        lengths = [len(one.token_ids) for one in pieces]
        found[number] = Stored(
            np.concatenate([one.token_ids for one in pieces]),
            np.concatenate([one.action_mask for one in pieces]),
            np.concatenate([one.behavior_logprobs for one in pieces]),
            np.repeat(np.array([one.version for one in pieces], np.int32), lengths),
            np.repeat(np.array([one.turn for one in pieces], np.int32), lengths),
        )
    return found


@dataclass
class Verdict:
    """Of one episode."""

    name: str
    turns: int
    tokens: int
    trained: int
    untrained_turns: int
    versions: int
    branches: Counter[str]
    refused: Counter[str]
    first_prompt: int
    longest_prompt: int
    samples: list[Sample] = field(default_factory=list)
    """That it is made of."""
    has_report: bool = True
    """Of the player itself: without one nothing is known of the branches that it caused."""
    false_branches: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def judged(trajectory: Trajectory, name: str, part: Part, samples: Samples) -> Verdict:
    record = trajectory.segments
    branches = stored(record)
    asked = {one.turn: one.asked for one in record if one.asked is not None}
    reasons = Counter(one.reason for one in asked.values() if one.reason)
    begins = [begin for one in branches.values() for begin, _ in one.said()]
    found = Verdict(
        name,
        turns=len(asked),
        tokens=sum(one.num_actions for one in record),
        trained=trajectory.num_trained,
        untrained_turns=len(record[-1].untrained_turns),
        versions=len({one.version for one in record if one.num_actions}),
        branches=reasons,
        refused=Counter(one.refused for one in part.requests if one.refused),
        first_prompt=begins[0] if begins else 0,
        longest_prompt=max(begins, default=0),
    )
    found.faults += [
        *not_sampled(branches, samples, found.samples),
        *not_trained_once(trajectory, branches),
        *not_what_was_asked(branches, part),
    ]
    if name not in PACKAGES:
        found.false_branches += false_branches(asked, part)
    elif "branches" not in (part.report or {}):
        found.has_report = False
    elif reasons != (meant := caused((part.report or {})["branches"], branches, asked)):
        found.false_branches.append(f"branches {dict(reasons)}, and the player caused {dict(meant)}")
    return found


def caused(told: Mapping[str, int], branches: Mapping[int, Stored], asked: Mapping[int, Asked]) -> Counter[str]:
    """The branches of which a player tells. Where two samples of an equal request are equal too, as those of a small
    model are now and then, an edited history goes on from the other one, and makes none."""
    gone_on_from = {one.parent for one in asked.values()}
    alike: Counter[tuple[bytes, bytes]] = Counter()
    for one in branches.values():
        for begin, end in one.said():
            if int(one.turns[begin]) in gone_on_from:
                alike[one.ids[:begin].tobytes(), one.ids[begin : end - 1].tobytes()] += 1
    return Counter(told) - Counter(edited_history=sum(number - 1 for number in alike.values()))


def false_branches(asked: Mapping[int, Asked], part: Part) -> Iterator[str]:
    """A coding agent sends back what it was answered: what begins with all of an earlier request goes on from it."""
    for turn, before in goes_on(observed(part.requests)).items():
        if turn in asked and asked[turn].reason:
            yield f"turn {turn} goes on from turn {before} and began a branch: {asked[turn].reason}"


def not_sampled(branches: Mapping[int, Stored], samples: Samples, met: list[Sample]) -> Iterator[str]:
    """What is stored is, token by token, what the engine answered behind exactly these ids. ``met``: takes the samples
    that were found."""
    for number, one in branches.items():
        for begin, end in one.said():
            if len(set(one.turns[begin:end].tolist())) != 1:
                yield f"branch {number}: what was sampled at {begin} belongs to several turns"
            place = begin
            while place < end:
                sample = _matched(one, place, end, samples)
                if sample is None:
                    yield f"branch {number}: what is stored at {place} was not sampled behind these ids"
                    break
                met.append(sample)
                place += len(sample.ids)  # what was sampled behind the end of a turn is not stored


def _matched(one: Stored, place: int, end: int, samples: Samples) -> Sample | None:
    """The longest answer of the engine that stands at ``place``."""
    best = None
    for sample in samples.behind.get(name_of(one.ids[:place]), ()):
        length = min(len(sample.ids), end - place)
        here = slice(place, place + length)
        versions = [int(label.rpartition("/")[2]) for label in sample.versions[:length]]
        is_it = (
            (sample.ids[:length] == one.ids[here]).all()
            and (sample.logprobs[:length] == one.logprobs[here]).all()
            and (np.array(versions, np.int32) == one.versions[here]).all()
        )
        if is_it and (best is None or len(sample.ids) > len(best.ids)):
            best = sample
    return best


def not_trained_once(trajectory: Trajectory, branches: Mapping[int, Stored]) -> Iterator[str]:
    where: dict[int, set[int]] = defaultdict(set)
    actions: Counter[int] = Counter()
    for number, one in branches.items():
        for turn, count in Counter(one.turns[one.acts].tolist()).items():
            where[turn].add(number)
            actions[turn] += count
    if several := {turn: sorted(numbers) for turn, numbers in where.items() if len(numbers) > 1}:
        yield f"turns are actions of several branches: {several}"
    untrained = set(trajectory.segments[-1].untrained_turns)
    trained: Counter[int] = Counter()
    for branch in trajectory.branches:
        trained.update(branch.turn_ids[branch.action_mask].tolist())
    if trained != Counter({turn: count for turn, count in actions.items() if turn not in untrained}):
        yield "not each sampled token is trained once"
    parents = {one.asked.parent for one in trajectory.segments if one.asked is not None}
    if gone_on := parents & untrained:
        yield f"turns that others go on from are not trained: {sorted(t for t in gone_on if t is not None)}"


def not_what_was_asked(branches: Mapping[int, Stored], part: Part) -> Iterator[str]:
    """Each turn was sampled behind the texts that asked for it and no others, as far as they are marked."""
    asked = {one.turn: one.marks for one in part.requests if one.turn is not None}
    decode = qwen_codec().tokenizer.decode
    for one in branches.values():
        for begin, _ in one.said():
            turn = int(one.turns[begin])
            if turn not in asked:
                yield f"turn {turn} is stored, and nobody had it"
            elif (marks := marks_in(decode(one.ids[:begin].tolist()))) != asked[turn]:
                yield f"turn {turn} read {marks}, and {asked[turn]} were sent"


@dataclass
class Computed:
    """Log-probs that were computed again."""

    tokens: int = 0
    equal: int = 0
    largest: float = 0.0
    passes: int = 0
    versions: int = 0
    other_tokens: int = 0
    """Computed under another version, as a control."""
    other_equal: int = 0


def trajectories(job: JobDir) -> list[Trajectory]:
    log = BatchLog(job)
    return [one for at in log.steps() for group in log.read(*at).groups for one in group]


def computed_again(job: JobDir, found: Sequence[Trajectory], num_control: int = 10) -> Computed:
    """Every token of these episodes under the weights of its version; those of the first ones under others too."""
    by_version: dict[int, list[tuple[Branch, int]]] = defaultdict(list)
    for trajectory in found:
        for branch in trajectory.branches:
            for place in branch.action_mask.nonzero()[0].tolist():
                by_version[int(branch.versions[place])].append((branch, place))
    store, told = WeightStore(job), Computed(versions=len(by_version))
    for version, tokens in sorted(by_version.items()):
        told.passes += len({id(branch) for branch, _ in tokens})
        for difference in differences(store.path(version), tokens):
            told.tokens += 1
            told.equal += difference <= TOLERANCE
            told.largest = max(told.largest, difference)
    known = store.versions()
    for version, tokens in sorted(by_version.items())[:num_control]:
        few = [one for one in tokens if one[0] is tokens[0][0]]
        other = next((one for one in known if one != version), None)
        if other is not None:
            for difference in differences(store.path(other), few):
                told.other_tokens += 1
                told.other_equal += difference <= TOLERANCE
    return told
