"""Of agents, who own their loop: what they were answered is what is trained, nothing else is, and each came to its end
by asking again. Their worlds are judged as those of other jobs are, by the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_core.types import Trajectory
from tests.chaos.evidence import Evidence, JobEvidence, lines
from tests.chaos.hostile import REF
from tests.chaos.judge_losses import UNREADABLE
from tests.chaos.judge_tokens import all_episodes, episodes, first_words, turns
from tests.chaos.talk import Talker

Heard = dict[tuple[str, int], list[tuple[str, list[int]]]]
"""(run, turn) -> the words and the numbers to add, more than once where the turn was asked for again."""
LOSES_THE_QUEUE = {"flushall", "spoil group"}
"""Then every open group is played anew, under the names that its episodes had: what was heard before does not count."""
STILL_OWED = 1
"""Turns of an episode that its agent may have had although the gateway could not note it: the last one."""


def only_what_was_heard_is_trained(evidence: Evidence, job: JobEvidence, talker: Talker) -> Iterator[str]:
    """An answer that was lost is asked for again and given again; one that no agent had is not trained."""
    heard: Heard = {}
    for path in _heard_files(evidence, job):
        for one in (line for line in lines(path) if "event" not in line):
            key, said = (one["run"], one["turn"]), (one["text"].strip(), one["numbers"])
            before = heard.setdefault(key, [])
            if before and before[-1] != said and not _lost_its_queue(job):
                yield f"run {one['run']} was answered {before[-1]} and then {said} in turn {one['turn']}"
            before.append(said)
    for step, trajectory in all_episodes(job):
        may_be_owed = job.spec.is_of_agents and trajectory.num_turns <= STILL_OWED
        # A world that is ended for what it does in the first turn leaves nothing to train.
        if not trajectory.branches and not may_be_owed and not _attacks(job):
            yield f"step {step}: {trajectory.key}: none of its {trajectory.num_turns} turns is trained"
    for step, trajectory in episodes(job) if job.spec.is_of_agents else ():
        for problem in _unheard(trajectory, heard, talker, is_whole=not _lost_its_queue(job)):
            yield f"step {step}: {trajectory.key}: {problem}"


def _attacks(job: JobEvidence) -> bool:
    return any(one.ref == REF for one in job.spec.environments)


def _lost_its_queue(job: JobEvidence) -> bool:
    return any(hit["kind"] in LOSES_THE_QUEUE for hit in job.hits)


def _unheard(trajectory: Trajectory, heard: Heard, talker: Talker, *, is_whole: bool) -> Iterator[str]:
    if len(trajectory.branches) != 1:
        yield f"an agent that never goes back has {len(trajectory.branches)} branches"
        return
    (branch,), ((_, run),) = trajectory.branches, first_words(trajectory, talker)
    ids = branch.token_ids.tolist()
    trained = list(turns(branch.action_mask.tolist()))
    for turn, (begin, end) in enumerate(trained):
        parsed = talker.codec.parse(ids[begin:end])
        said = (parsed.text.strip(), [_number(call.arguments) for call in parsed.calls])
        if said not in heard.get((run, turn), ()):
            yield f"turn {turn} says {said}, its agent heard {heard.get((run, turn))}"
    num_heard = sum(name == run for name, _ in heard)
    if is_whole and num_heard - len(trained) > STILL_OWED:
        yield f"its agent heard {num_heard} turns, {len(trained)} of them are trained"


def _number(arguments: Any) -> int:
    return int(arguments["number"])


def _heard_files(evidence: Evidence, job: JobEvidence) -> Iterator[Path]:
    for one in job.spec.environments:
        ledger = Path(str(one.config["ledger"]))
        yield evidence.work / f"heard-{ledger.name}"


def agents_come_to_their_end(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """No episode was given up but one whose records were spoiled."""
    if job.spec.is_of_agents:
        letters = [one for one in evidence.samples if one["kind"] == "dead letter" and one["job"] == job.id]
        for one in letters:
            if UNREADABLE not in one["reason"]:
                yield f"an episode of group {one['group']} was given up: {one['reason']}"


def no_agent_failed(evidence: Evidence) -> Iterator[str]:
    """Behind the URL: what the end of each says is no failure. With Redis the secret is lost that keys are signed with:
    who began before learns from a later gateway that nobody knows the key."""
    noted = lines(evidence.work / "agents.jsonl")
    begun = {one["run"]: one["episode"] for one in noted if one["event"] == "began"}
    ends = {one["run"]: one for one in noted if one["event"] in ("ended", "was over", "failed")}
    for run, episode in begun.items():
        end = ends.get(run)
        is_wiped = any(fault["kind"] == "flushall" and "missed" not in fault for fault in evidence.faults)
        is_explained = is_wiped and "AuthenticationError" in (end or {}).get("why", "")
        if end is not None and end["event"] == "failed" and not is_explained:
            yield f"the agent of {episode} (run {run}) failed: {end['why']}"
    if len(set(begun.values())) != len(begun):
        yield "an attempt was begun by two agents"
