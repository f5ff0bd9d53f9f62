"""Of each trained episode: every token was said by an engine under the weights that are recorded, with the recorded
log-prob, or by one and the same world in answer to it. Each check yields what is wrong.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gspo_core.messages import ToolCall
from gspo_core.types import Trajectory
from tests.apparatus.scripted_engine import language
from tests.chaos.chain import chain
from tests.chaos.evidence import Evidence, JobEvidence
from tests.chaos.talk import VOCABULARY, Talker

TOLERANCE = 1e-4
MAX_EPISODES = 400
"""Of each job, drawn at random: a log-prob costs the oracle as much as it cost the engine."""
_ANSWER = re.compile(r"(\w{6}) (\d+) (\w{6})")
_TASK = re.compile(r"task (\d+) (\w{6})")


def episodes(job: JobEvidence) -> list[tuple[int, Trajectory]]:
    """Those of which something is trained."""
    found = [(step, trajectory) for step, trajectory in all_episodes(job) if trajectory.branches]
    return random.Random(job.id).sample(found, min(MAX_EPISODES, len(found)))


def all_episodes(job: JobEvidence) -> Iterator[tuple[int, Trajectory]]:
    for (_, step), batch in job.batches.items():
        for group in batch.groups:
            yield from ((step, trajectory) for trajectory in group.trajectories)


def tokens_were_sampled(job: JobEvidence) -> Iterator[str]:
    for step, trajectory in episodes(job):
        for branch in trajectory.branches:
            ids = branch.token_ids.tolist()
            versions = branch.versions.tolist()
            acts = branch.action_mask.tolist()
            for version in {version for version, act in zip(versions, acts, strict=True) if act}:
                places = [place for place, act in enumerate(acts) if act and versions[place] == version]
                true = _logprobs(ids, places, job.weights_name(version))
                worst = float(np.max(np.abs(true - branch.behavior_logprobs[places])))
                if not worst <= TOLERANCE:
                    problem = f"version {version} does not give its log-probs ({worst:.3g} off)"
                    yield f"step {step}: {trajectory.key}: {problem}"


def _logprobs(ids: Sequence[int], places: Sequence[int], weights: str) -> np.ndarray:
    """Of the tokens at ``places``, everything before them read under ``weights``."""
    state, wanted, found = language.EMPTY, set(places), []
    for place in range(places[-1] + 1):
        if place in wanted:
            found.append(language.logprobs(state, weights, 1.0, VOCABULARY)[ids[place]])
        state = language.read(state, ids[place], weights)
    return np.array(found)


def talk_follows(job: JobEvidence, talker: Talker) -> Iterator[str]:
    """Turns are what the script says, answers what a world says that has seen these calls, all of one run."""
    for step, trajectory in episodes(job):
        for problem in _broken_talk(trajectory, talker):
            yield f"step {step}: {trajectory.key}: {problem}"


def _broken_talk(trajectory: Trajectory, talker: Talker) -> Iterator[str]:
    (branch,) = trajectory.branches
    ids, acts = branch.token_ids.tolist(), branch.action_mask.tolist()
    said = first_words(trajectory, talker)
    runs, state, count, total = {run for _, run in said}, "", 0, 0
    for begin, end in turns(acts):
        turn = ids[begin:end]
        if turn != talker.turn(ids[:begin], turn[0]):
            yield "a turn is not what the engine says after this prompt"
            return
        parsed = talker.codec.parse(turn)
        if not parsed.calls:
            continue
        number = _number(parsed.calls[0])
        state, count, total = chain(state, number), count + 1, total + number
        answered = ids[end : next((place for place in range(end, len(ids)) if acts[place]), len(ids))]
        found = _ANSWER.findall(talker.codec.tokenizer.decode(answered))
        if not found and end == len(ids):
            continue
        if not found or found[0][1:] != (str(count), state):
            yield f"call {count} is answered with {found}, a world that saw these calls says {count} {state}"
            return
        runs.add(found[0][0])
    if len(runs) != 1:
        yield f"it was answered by the runs {sorted(runs)} of its world"
    reward = trajectory.outcome.reward
    if reward is not None and abs(reward - (total % 97) / 97) > 1e-6:
        yield f"its reward is {reward}, not that of its calls"


def first_words(trajectory: Trajectory, talker: Talker) -> list[tuple[int, str]]:
    """The number of the task and the run of the world, as the prompt says them."""
    (branch,) = trajectory.branches
    prompt = branch.token_ids[: branch.action_mask.argmax()].tolist()
    return [(int(number), run) for number, run in _TASK.findall(talker.codec.tokenizer.decode(prompt))]


def _number(call: ToolCall) -> int:
    arguments = call.arguments
    assert isinstance(arguments, dict)
    return int(str(arguments["number"]))


def turns(acts: Sequence[bool]) -> Iterator[tuple[int, int]]:
    begin = None
    for place, act in enumerate([*acts, False]):
        if act and begin is None:
            begin = place
        elif not act and begin is not None:
            yield begin, place
            begin = None


def nothing_acted_twice(evidence: Evidence, job: JobEvidence, talker: Talker) -> Iterator[str]:
    """In one attempt, in worlds whose acts are written down outside of them.

    A new attempt may begin at a world that was kept, and goes on with the run of that world: an act of the run may be
    found once for each attempt that the trained episode had. What was not trained is not known to have had only one.
    """
    attempts = _attempts_by_run(job, talker)
    for spec in job.spec.environments:
        path = evidence.work / Path(str(spec.config["ledger"])).name
        acts = Counter(path.read_text().splitlines()) if path.exists() else Counter()
        is_kept = spec.ref.endswith(":Kept")
        for act, count in acts.items():
            allowed = attempts.get(act.split()[0], math.inf) if is_kept else 1
            if count > allowed:
                yield f"{path.name}: {count} times in {allowed} attempts of one run of its world: act {act}"


def _attempts_by_run(job: JobEvidence, talker: Talker) -> dict[str, int]:
    return {
        run: trajectory.attempt + 1
        for _, trajectory in all_episodes(job)
        if trajectory.branches
        for _, run in first_words(trajectory, talker)
    }
