"""Judges what is stored of episodes against what their policies sampled and what their players say that they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_core.types import Segment, Trajectory
from tests.play.stage import Part
from tests.play.wire import marks_in
from tests.services.gateway.gateway_kit import judge

PREFIX = "drift/forks_"


@dataclass
class Tally:
    """Of the episodes of one package."""

    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    branches: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    parallel: int = 0
    features: Counter[str] = field(default_factory=Counter)
    rendered_again: int = 0
    shortest: int = 0
    """Of the prompts that episodes begin with, in tokens."""
    longest: int = 0
    """Of all prompts."""
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        branches = ", ".join(f"{reason} {number}" for reason, number in sorted(self.branches.items()))
        return (
            f"{self.episodes} episodes, {self.turns} turns, {self.tokens} tokens sampled, branches: {branches}, "
            f"{self.retries} retries, {self.parallel} turns with parallel calls, "
            f"{self.rendered_again} tokens rendered again, {len(self.faults)} faults"
        )


def tally(parts: Sequence[Part]) -> Tally:
    found = Tally()
    for number, part in enumerate(parts):
        try:
            _check(part)
        except AssertionError as error:
            found.faults.append(f"episode {number} ({part.task}): {error}")
        _add(found, part)
    return found


def reasons_of(part: Part) -> Counter[str]:
    counted = part.counters.snapshot()
    return Counter({name.removeprefix(PREFIX): int(n) for name, n in counted.items() if name.startswith(PREFIX)})


def _add(found: Tally, part: Part) -> None:
    report: Any = part.report or {}
    found.episodes += 1
    found.turns += part.num_turns
    found.tokens += sum(segment.num_actions for segment in part.record)
    found.branches += reasons_of(part)
    found.retries += part.num_mishaps
    found.parallel += report.get("parallel", 0)
    found.features.update(part.task.get("features", ()))
    found.rendered_again += int(part.counters.snapshot().get("tokens/rendered_again", 0))
    prompts = [len(one.prompt) for one in part.policy.served]
    if prompts:
        found.shortest = min(prompts[0], found.shortest or prompts[0])
        found.longest = max(*prompts, found.longest)


def _check(part: Part) -> None:
    assert not part.failure, part.failure
    assert part.stop == "completed", part.stop
    assert part.report is not None
    _check_tokens(part)
    _check_branches(part, part.report)
    _check_requests(part)
    assert part.report["turns"] >= part.task["turns"], f"only {part.report['turns']} turns"
    assert not part.mishaps, "a mishap met no request"
    assert part.num_mishaps == part.report["retries"]
    for feature, number in (("parallel", part.report["parallel"]), ("retry", part.num_mishaps)):
        assert number or feature not in part.task["features"], f"no {feature}"
    assert part.report["calls_lost"] == 0, "not all calls that were spoken arrived"


def _check_tokens(part: Part) -> None:
    """Stored ids are sampled ids, and each sampled token is an action of one branch."""
    record, served = part.record, part.policy.served
    judge(record, served)
    for segment in record:
        versions = {part.policy.versions[value] for value in segment.behavior_logprobs[segment.action_mask].tolist()}
        assert versions <= {segment.version}, f"sampled by {versions}, stored as of {segment.version}"
    actions = [value for segment in record for value in segment.behavior_logprobs[segment.action_mask].tolist()]
    sampled = [value for one in served for value in one.logprobs]
    if not part.report or not part.report.get("stops"):
        assert actions == sampled or sorted(actions) == sorted(sampled), "not all that was sampled is stored"
    else:  # what is behind a stop text is not
        assert set(actions) <= set(sampled)
    trained = [value for branch in _branches(part) for value in branch]
    rejected = _rejected(part)
    chosen = [value for value in actions if value not in rejected]
    assert sorted(trained) == sorted(chosen), "not each sampled token is trained once"


def _rejected(part: Part) -> set[float]:
    """The log-probs of samples that were taken for an equal request, and nobody went on from."""
    untrained = part.record[-1].untrained_turns
    parents = {one.asked.parent for one in part.record if one.asked is not None}
    assert len(untrained) <= reasons_of(part)["resampled"], f"{len(untrained)} turns are not trained"
    assert not parents & set(untrained), "a turn that others go on from is not trained"
    pieces = [one.behavior_logprobs[one.action_mask].tolist() for one in part.record if one.turn in untrained]
    return {value for piece in pieces for value in piece}


def _check_requests(part: Part) -> None:
    """Each turn was sampled behind the conversation that asked for it and nothing else, and ended where it was to."""
    decode = part.policy.codec.tokenizer.decode
    sampled = _sampled_by_turn(part.record)
    begins = {part.policy.served[begin].logprobs[0]: begin for begin in part.policy.begins}
    for request in part.requests:
        if request.turn in sampled:
            ids, first = sampled[request.turn]
            marks = marks_in(decode(part.policy.served[begins[first]].prompt))
            assert marks == request.marks, f"turn {request.turn} read {marks}, and {request.marks} were sent"
            before = decode(ids[:-1])
            assert not any(stop in before for stop in request.stops), f"turn {request.turn} goes on behind a stop text"
            assert request.max_tokens is None or len(ids) <= request.max_tokens, f"turn {request.turn} is too long"


def _sampled_by_turn(record: Sequence[Segment]) -> dict[int, tuple[list[int], float]]:
    """The ids of each turn that has some, and the log-prob of the first."""
    found: dict[int, tuple[list[int], float]] = {}
    for segment in record:
        mask = segment.action_mask.astype(bool)
        if mask.any():
            ids, _ = found.setdefault(segment.turn, ([], float(segment.behavior_logprobs[mask][0])))
            ids += segment.token_ids[mask].tolist()
    return found


def _branches(part: Part) -> Iterable[list[float]]:
    """The log-probs that each training sequence trains."""
    for branch in Trajectory(tuple(part.record)).branches:
        mask = branch.action_mask.astype(bool)
        yield branch.behavior_logprobs[mask].tolist()


def _check_branches(part: Part, report: Any) -> None:
    """No branch but those that the player has caused, each for the reason that it gives."""
    record = part.record
    found, meant = reasons_of(part), Counter(report["branches"])
    assert found == meant, f"branches {dict(found)}, and the player caused {dict(meant)}"
    assert part.num_turns == report["turns"], f"{part.num_turns} turns, and the player had {report['turns']}"
    extended = int(part.counters.snapshot().get("drift/answer_extended", 0))
    assert report["extended"] == extended, f"{extended} answers extended, not {report['extended']}"
    assert part.num_turns == len({segment.turn for segment in record if segment.num_actions}), "a turn without a token"
    missing = 1 + found.total() - len({segment.branch for segment in record})
    assert missing == 0, f"{missing} branches are not stored"
