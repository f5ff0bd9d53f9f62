"""Rewards computed again from what they were made from: the same code gives the same number, another one is found."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gspo_core.cli import main
from gspo_core.env import PlainEnvironment, load_environment
from gspo_core.evidence import TASK, gathered
from gspo_core.job_spec import EVIDENCE_BYTES
from gspo_core.log import layout
from gspo_core.log.batches import encode_batch
from gspo_core.log.records import AcceptedJob, encode_record
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall
from gspo_core.position import Position
from gspo_core.replay.past import Past, PastError
from gspo_core.replay.rescoring import Rescored, RewardFailed, rescore
from gspo_core.replay.reward_forms import own_reward, reward_of
from gspo_core.spec import JobSpec
from gspo_core.types import NOTHING, EpisodeKey, Evidence, Group, Outcome, Split, StopReason, Trajectory, TurnReward
from tests.core.segments import segment

SIZE, GROUPS = 8, 4
WORLD = '''
class Shop:
    """Spend the budget, and not more."""

    tasks = [{"prompt": "Shop.", "budget": budget / 7} for budget in range(3, 30)]

    def reset(self, prompt: str, budget: float) -> str:
        self._budget, self.spent, self.seen, self.last = budget, 0.0, set(), ()
        return prompt

    def buy(self, price: float, ctx) -> str:
        """Buy something.

        Args:
            price: what it costs
        """
        self.spent += price
        self.seen.add(price)
        self.last = (price, len(self.seen))
        ctx.reward(0.1 * price)
        ctx.metric("items", len(self.seen))
        return "bought"

    def get_reward(self, ctx):
        assert isinstance(self.last, tuple) and isinstance(self.seen, set)
        within = self.spent <= self._budget
        return {"within": float(within), "near": self.spent / self._budget / 3, "task": ctx.task["budget"] / 1e3}
'''


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("worlds") / "shop.py"
    file.write_text(WORLD)
    return file


def spec_for(*environments: Mapping[str, Any]) -> JobSpec:
    return JobSpec.model_validate({"model": "/nowhere", "environments": environments, "rollout": {"group_size": SIZE}})


def write_job(folder: Path, spec: JobSpec, groups: Iterator[Group]) -> Past:
    accepted = AcceptedJob(spec.model_dump_json(), "d", "2026-01-01T00:00:00Z")
    folder.mkdir(parents=True)
    (folder / layout.BATCHES).mkdir()
    (folder / layout.ACCEPTED).write_bytes(encode_record(accepted))
    for step in itertools.count(1):
        if not (batch := list(itertools.islice(groups, GROUPS))):
            return Past(folder)
        at = Position(1, step)
        (folder / layout.BATCHES / layout.step_name(at)).write_bytes(
            b"".join(encode_batch(at, batch, {"staleness": {"7": 0}}))
        )
    raise AssertionError


def episode(job: str, group: int, member: int, outcome: Outcome, paid: Mapping[int, float]) -> Trajectory:
    turns = tuple(TurnReward(*one) for one in sorted(paid.items()))
    return Trajectory((segment(key=EpisodeKey(job, group, member), outcome=outcome, turn_rewards=turns),))


async def played(environment: PlainEnvironment, index: int, rng: random.Random) -> tuple[Outcome, dict[int, float]]:
    """As a rollout worker puts a reward together."""
    session = environment.session()
    session.keep_evidence(EVIDENCE_BYTES)
    await session.start(await environment.task(Split.TRAIN, index), 0)
    paid = dict[int, float]()
    for turn in range(rng.randint(1, 4)):
        call = ToolCall("buy", {"price": rng.random()}, CallStatus.OK, "", 0, 0)
        observation = await session.act(ParsedTurn("", (call,)))
        assert observation.reward is not None
        paid[turn] = observation.reward
    reward, parts = await session.score()
    reward += sum(paid.values())
    cost = rng.choice([0.0, rng.random()])
    evidence, metrics = session.evidence, dict(session.metrics)
    await session.close()
    if cost:
        reward, parts = reward - cost, {**parts, "overlong": -cost}
    return Outcome(StopReason.COMPLETED, reward, parts, metrics, evidence), paid


@pytest.fixture(scope="module")
def shopping(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """1,024 episodes of a real world."""
    ref, rng = f"{shop}:Shop", random.Random(7)
    environment = load_environment(ref)
    assert isinstance(environment, PlainEnvironment)
    folder = tmp_path_factory.mktemp("jobs") / "job_a"

    async def play() -> list[Group]:
        groups = []
        for number in range(128):
            index = number % 27
            outcomes = [await played(environment, index, rng) for _ in range(SIZE)]
            members = tuple(episode("job_a", number, member, *one) for member, one in enumerate(outcomes))
            groups.append(Group("job_a", number, Split.TRAIN, index, SIZE, members))
        return groups

    groups = asyncio.run(play())
    return write_job(folder, spec_for({"ref": ref}), iter(groups))


def all_steps(past: Past) -> list[int]:
    return sorted(past.batches)


def test_the_own_reward_gives_every_recorded_reward_to_the_last_bit(shopping: Past) -> None:
    rows = list(rescore(shopping, own_reward(shopping.spec), all_steps(shopping)))
    assert len(rows) == 1024
    assert len({row.old for row in rows}) > 1000
    assert [row.new for row in rows] == [row.old for row in rows]
    assert all(row.new_advantage == row.old_advantage for row in rows)


def test_a_bug_that_is_planted_is_found_and_its_mending_shows_what_flips(
    shopping: Past, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the job had been trained with the bug: what the mended world says differs for those alone it is about."""
    other = tmp_path / "mended.py"
    other.write_text(WORLD.replace("self.spent <= self._budget", "self.spent <= self._budget / 2"))
    rows = list(rescore(shopping, reward_of(_class_of(other), shopping.spec), all_steps(shopping)))
    expected = {
        str(one.key)
        for step in all_steps(shopping)
        for one in shopping.batch(step).trajectories
        if 0.5 < _share(one) <= 1
    }
    assert 50 < len(expected) < 1000
    assert {str(row.episode) for row in rows if row.new != row.old} == expected
    assert all(row.new == pytest.approx(row.old - 1) for row in rows if row.new != row.old)
    flipped = [row for row in rows if row.flips]
    assert flipped

    arguments = ["rescore", str(shopping.folder), "--reward", f"{other}:Shop"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"1024 episodes with a reward; {len(expected)} get another; the advantage of {len(flipped)} flips" in said
    named = set(re.findall(r"job_a/\d+/\d+", said))
    assert named
    assert named <= {str(row.episode) for row in flipped}
    assert main([*arguments[:2], "--json"]) == 0
    assert all(row["reward"] == row["other_reward"] for row in map(json.loads, capsys.readouterr().out.splitlines()))


def _class_of(file: Path) -> object:
    from gspo_core.replay.rescore_command import load_named

    return load_named(f"{file}:Shop")


def _share(one: Trajectory) -> float:
    state: dict[str, Any] = one.outcome.evidence.state
    return float(state["spent"] / state["_budget"])


# Agents


JUDGED = {"url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{{answer}}", "after": "SCORE:"}


def of_agents(agent: Mapping[str, Any], ref: str = "nowhere.py:run") -> JobSpec:
    return spec_for({"ref": ref, "agent": agent})


def one_group(spec: JobSpec, folder: Path, outcomes: list[tuple[Outcome, dict[int, float]]]) -> Past:
    members = tuple(episode("job_a", 3, member, *one) for member, one in enumerate(outcomes))
    return write_job(folder / "job_a", spec, iter([Group("job_a", 3, Split.TRAIN, 0, SIZE, members)]))


def outcome(reward: float, evidence: Evidence, **parts: float) -> Outcome:
    return Outcome(StopReason.COMPLETED, reward, parts, {}, evidence)


def kept(**values: object) -> Evidence:
    return gathered(values.items(), EVIDENCE_BYTES)


def test_the_answer_of_a_judge_is_read_again_and_nobody_is_asked(tmp_path: Path) -> None:
    answers = [(f"Good. SCORE: {number / 9}", number / 9) for number in range(7)]
    outcomes = [(outcome(score, kept(judge=text), judge=score), {}) for text, score in answers]
    outcomes.append((outcome(0.3 + 0.5, kept(judge="SCORE: .3", task={"n": 1}), judge=0.3), {1: 0.5}))
    spec = of_agents({"judge": JUDGED})
    past = one_group(spec, tmp_path, outcomes)
    assert all(row.new == row.old for row in rescore(past, own_reward(spec), [1]))
    stricter = of_agents({"judge": {**JUDGED, "after": "Good. SCORE:"}})
    with pytest.raises(RewardFailed, match=r"job_a/3/7: NoScore"):
        list(rescore(past, own_reward(stricter), [1]))


def judged(task: Any, result: Any) -> float:
    return float(result == task["answer"])


def test_a_judge_of_agents_is_given_task_and_result(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        'tasks = [{"answer": 4}]\n\ndef run(task, llm):\n    return 4\n\n'
        "async def get_reward(result, task, ctx):\n    return {'right': float(result == ctx.task['answer'])}\n"
    )
    right, wrong = kept(task={"answer": 4}, result=4), kept(result="4", task={"answer": 4})
    posted = kept(task={"answer": 4})
    outcomes = [(outcome(1.0, right, right=1.0), {}), (outcome(0.0, wrong, right=0.0), {}), (outcome(0.7, posted), {})]
    spec = of_agents({}, f"{file}:run")
    past = one_group(spec, tmp_path, outcomes)
    for reward in (own_reward(spec), reward_of(judged, spec)):
        assert [row.new for row in rescore(past, reward, [1])] == [1.0, 0.0, 0.7]


def test_what_was_paid_by_the_turn_alone_stays(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("tasks = [{}]\n\ndef run(task, llm):\n    return None\n")
    spec = of_agents({}, f"{file}:run")
    past = one_group(spec, tmp_path, [(outcome(0.1 + 0.2, kept(task={}, result=None)), {0: 0.1, 3: 0.2})])
    assert all(row.new == row.old for row in rescore(past, own_reward(spec), [1]))


@pytest.mark.parametrize(
    ("evidence", "stop", "why"),
    [
        (NOTHING, StopReason.COMPLETED, "was not kept"),
        (Evidence({TASK: "{}"}, {"state.spent": "is a Decimal, which is not kept"}), StopReason.COMPLETED, "a Decimal"),
    ],
)
def test_what_was_not_kept_is_no_reward(
    shop: Path, tmp_path: Path, evidence: Evidence, stop: StopReason, why: str
) -> None:
    spec = spec_for({"ref": f"{shop}:Shop"})
    past = one_group(spec, tmp_path, [(Outcome(stop, 1.0, {}, {}, evidence), {})])
    with pytest.raises(RewardFailed, match=rf"job_a/3/0.*{why}"):
        list(rescore(past, own_reward(spec), [1]))


@pytest.mark.parametrize("stop", [StopReason.TOOL_TIMEOUT, StopReason.MAX_TOKENS])
def test_a_reward_that_the_end_decided_stays(shop: Path, tmp_path: Path, stop: StopReason) -> None:
    spec = spec_for({"ref": f"{shop}:Shop"})
    past = one_group(spec, tmp_path, [(Outcome(stop, -3.0), {})])
    assert [row.new for row in rescore(past, own_reward(spec), [1])] == [-3.0]


PAYING = """
class World:
    tasks = [{{}}]

    def reset(self) -> str:
        return "Go."

    def get_reward(self) -> float:
        return {}
"""


def test_each_of_several_environments_judges_its_own_episodes(tmp_path: Path) -> None:
    files = []
    for name, reward in (("first", "self.value"), ("second", "-self.value / 3")):
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(PAYING.format(reward))
    spec = spec_for(*({"ref": f"{file}:World"} for file in files))
    told = [
        gathered([("environment", number), ("task", {}), ("state.value", 0.7)], EVIDENCE_BYTES) for number in (0, 1)
    ]
    broken = Outcome(StopReason.TOOL_TIMEOUT, -3.0, {}, {}, gathered([("environment", 1)], EVIDENCE_BYTES))
    outcomes = [(outcome(0.7, told[0]), {}), (outcome(-0.7 / 3, told[1]), {}), (broken, {})]
    past = one_group(spec, tmp_path, outcomes)
    assert [row.new for row in rescore(past, own_reward(spec), [1])] == [0.7, -0.7 / 3, -3.0]


def test_an_episode_that_does_not_say_which_environment_is_named(shop: Path, tmp_path: Path) -> None:
    spec = spec_for({"ref": f"{shop}:Shop"}, {"ref": f"{shop}:Shop"})
    past = one_group(spec, tmp_path, [(outcome(1.0, kept(task={})), {})])
    with pytest.raises(RewardFailed, match=r"job_a/3/0.*its environment was not kept"):
        list(rescore(past, own_reward(spec), [1]))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (spec_for({"ref": "shop@2"}), "registered"),
        (spec_for({"ref": "shop@2"}, {"ref": "a:B"}), "shop@2 is a registered"),
        (spec_for({"ref": "nowhere.py:Shop"}), "cannot be loaded here"),
    ],
)
def test_a_reward_that_is_not_at_hand_says_why(spec: JobSpec, why: str) -> None:
    with pytest.raises(PastError, match=why):
        own_reward(spec)


def test_only_rewards_are_taken() -> None:
    spec = spec_for({"ref": "a:B"})
    for found, why in ((3, "is no reward"), (Rescored, "has no get_reward")):
        with pytest.raises(PastError, match=why):
            reward_of(found, spec)
