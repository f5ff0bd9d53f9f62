"""An evaluation plays the same whoever plays, keeps what it played, and takes no failure for a reward."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gspo_core.env import CallStatus, Llm, ParsedTurn, PlainEnvironment, Start, ToolCall
from gspo_core.evaluation.episode import World
from gspo_core.evaluation.evaluation import EvalSetting, OtherSetting, chosen_tasks, evaluate, open_folder, task_seed
from gspo_core.evaluation.played import EPISODES_FILE, EpisodePlace, Played, PlayedFile, read_played, read_setting
from gspo_core.evaluation.policy import PolicyFailed, PolicyTurn, PolicyUnusable
from gspo_core.evaluation.report import EvalReport, compare, difference_lines
from gspo_core.messages import Message
from gspo_core.spec import EpisodeLimits
from gspo_core.types import Split, StopReason


class Adding:
    """Add until it is enough."""

    tasks = tuple({"target": number} for number in range(1, 7))
    eval_tasks = tuple({"target": number} for number in range(1, 5))
    reward_range = (-1.0, 1.0)

    def reset(self, target: int, seed: int, ctx) -> str:
        self.value, self.target, self.ctx = 0, target, ctx
        self.ctx.metric("seed", seed)
        return f"Reach {target}."

    def add(self, amount: int) -> str:
        """Add to it.

        Args:
            amount: how much
        """
        if amount > 9:
            self.done = True
        self.value += amount
        return str(self.value)

    def get_reward(self) -> dict[str, float]:
        if self.value > 99:
            raise OSError("the scales are broken")
        return {"reached": float(self.value == self.target), "exact": 0.0}


Says = Callable[[int, Sequence[Message]], str | int | StopReason]
"""From the number of the turn and the conversation: words, an amount to add, or why there is no turn."""


@dataclass
class Scripted:
    says: Says
    names: list[str] = field(default_factory=list)

    def converse(self, name: str, seed: int, limits: EpisodeLimits) -> ScriptedConversation:
        self.names.append(name)
        return ScriptedConversation(self.says)

    def llm(self, name: str) -> Llm:
        raise PolicyUnusable("nothing to ask")


class ScriptedConversation:
    def __init__(self, says: Says) -> None:
        self._says = says
        self._messages: list[Message] = []
        self._num_turns = 0

    def begin(self, start: Start) -> StopReason | None:
        self._messages += start.messages
        return None

    async def answer(self, max_tokens: int) -> PolicyTurn | StopReason:
        said = self._says(self._num_turns, self._messages)
        self._num_turns += 1
        if isinstance(said, StopReason):
            return said
        if isinstance(said, str):
            return PolicyTurn(ParsedTurn(said), {"role": "assistant", "content": said}, 3)
        call = ToolCall("add", {"amount": said}, CallStatus.OK, "", 0, 1)
        return PolicyTurn(ParsedTurn("", (call,)), {"role": "assistant", "content": "", "tool_calls": []}, 5)

    def read(self, turn: PolicyTurn, messages: Sequence[Message]) -> StopReason | None:
        self._messages += messages
        return None


def solves(turn: int, messages: Sequence[Message]) -> str | int:
    target = int(str(messages[1]["content"]).split()[-1].rstrip("."))
    return target if turn == 0 else "done"


def a_world(**limits: int | str) -> World:
    ticks = itertools.count()
    resolved = replace(EpisodeLimits(), **limits)  # type: ignore[arg-type]
    return World(PlainEnvironment(Adding, {}, name="Adding"), Split.EVAL, resolved, 100, lambda: float(next(ticks)))


SETTING = EvalSetting(
    model="scripted",
    environment="Adding",
    config={},
    agent=None,
    split="eval",
    tasks=[0, 1, 2, 3],
    samples=2,
    seed=7,
    sampling={},
    limits={},
    source="",
)


async def played(folder: Path, says: Says, world: World | None = None, setting: EvalSetting = SETTING) -> list[Played]:
    open_folder(folder, setting)
    return await evaluate(setting, world or a_world(), Scripted(says), folder, concurrency=3, tell=lambda one: None)


async def test_episodes_are_scored_with_parts_turns_and_tokens(tmp_path: Path) -> None:
    episodes = await played(tmp_path, solves)
    assert [one.place for one in episodes] == SETTING.places()
    assert {one.reward for one in episodes} == {1.0}
    first = episodes[0]
    assert (first.stop, first.num_turns, first.num_tokens, first.num_calls) == ("completed", 2, 8, 1)
    assert first.parts == {"reached": 1.0, "exact": 0.0}
    said = read_played(tmp_path)[first.place].messages
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one.messages for one in episodes] == [()] * 8, "all conversations at a time may be more than fits"
    report = EvalReport(SETTING, episodes).to_json()
    assert report["reward"]["mean"] == 1  # type: ignore[index, call-overload]
    assert (report["turns_mean"], report["tokens_mean"], report["failed"]) == (2, 8, 0)


async def test_all_episodes_of_a_task_begin_alike_whoever_plays(tmp_path: Path) -> None:
    one = await played(tmp_path / "a", solves)
    other = await played(tmp_path / "b", lambda turn, messages: "no")
    seeds = {episode.place: episode.metrics["seed"] for episode in one}
    assert seeds == {episode.place: episode.metrics["seed"] for episode in other}
    assert seeds == {place: task_seed(7, place.task) for place in SETTING.places()}
    assert len(set(seeds.values())) == 4


async def test_limits_end_episodes_as_in_training(tmp_path: Path) -> None:
    circling = await played(tmp_path / "turns", lambda turn, messages: 0, a_world(max_turns=3))
    assert {(one.stop, one.num_turns, one.reward) for one in circling} == {("max_turns", 3, 0.0)}
    short = await played(tmp_path / "tokens", lambda turn, messages: 0, a_world(max_episode_tokens=10))
    assert {(one.stop, one.num_tokens) for one in short} == {("max_tokens", 10)}
    calls = await played(tmp_path / "calls", lambda turn, messages: 0, a_world(max_tool_calls=2))
    assert {(one.stop, one.num_calls) for one in calls} == {("max_tool_calls", 3)}
    late = await played(tmp_path / "time", lambda turn, messages: 0, a_world(episode_timeout_s=1))
    assert {one.stop for one in late} == {"episode_timeout"}
    cut = await played(tmp_path / "cut", lambda turn, messages: StopReason.CONTEXT_OVERFLOW)
    assert {(one.stop, one.num_turns, one.reward) for one in cut} == {("context_overflow", 0, 0.0)}
    ended = await played(tmp_path / "done", lambda turn, messages: 10)
    assert {one.stop for one in ended} == {"env_done"}


async def test_a_failure_is_counted_apart_and_never_as_0(tmp_path: Path) -> None:
    def breaks_one(turn: int, messages: Sequence[Message]) -> str | int:
        return 100 if "Reach 2." in str(messages) and turn == 0 else solves(turn, messages)

    report = EvalReport(SETTING, await played(tmp_path, breaks_one))
    score = report.reward
    assert score is not None
    assert (score.mean, score.num_tasks, report.num_failed) == (1, 3, 2)
    assert report.failures() == {"score: error: OSError: the scales are broken": 2}
    assert "  failed       2 of 8, which enter no number above" in list(report.lines())


async def test_a_count_of_one_is_no_share(tmp_path: Path) -> None:
    counted = [replace(one, metrics={"searches": 1.0}) for one in await played(tmp_path, solves)]
    lines = list(EvalReport(SETTING, counted).lines())
    assert "  success      100.0 % (28.3 to 100.0)" in lines
    assert "  searches     1 (0.2831 to 1)" in lines


async def test_a_policy_that_fails_is_asked_again_and_then_counted_apart(tmp_path: Path) -> None:
    def away(turn: int, messages: Sequence[Message]) -> str:
        raise PolicyFailed("policy: it is away")

    policy = Scripted(away)
    setting = replace(SETTING, tasks=[0], samples=1)
    open_folder(tmp_path, setting)
    [one] = await evaluate(setting, a_world(retries=2), policy, tmp_path, concurrency=1, tell=lambda one: None)
    assert (one.reward, one.failure, one.stop) == (None, "policy: it is away", "env_error")
    assert policy.names == ["0/0"] * 3


async def test_a_policy_that_cannot_be_used_ends_the_evaluation(tmp_path: Path) -> None:
    def refused(turn: int, messages: Sequence[Message]) -> str:
        raise PolicyUnusable("a wrong key")

    with pytest.raises(PolicyUnusable, match="a wrong key"):
        await played(tmp_path, refused)


async def test_an_evaluation_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    whole = await played(tmp_path, solves)
    file = tmp_path / EPISODES_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # torn while it was written
    told: list[EpisodePlace] = []
    policy = Scripted(solves)
    again = await evaluate(SETTING, a_world(), policy, tmp_path, concurrency=2, tell=lambda one: told.append(one.place))
    assert [(one.place, one.reward) for one in again] == [(one.place, one.reward) for one in whole]
    kept = {EpisodePlace(*json.loads(line)["place"]) for line in lines[:3]}
    assert set(told) == set(SETTING.places()) - kept
    assert len(read_played(tmp_path)) == 8


def test_an_episode_is_kept_whatever_was_said(tmp_path: Path) -> None:
    said: Message = {"role": "assistant", "content": "one\u2028two\u2029three\x85four\r\x0b\x1cfive"}
    one = Played(EpisodePlace(0, 0), 1, "completed", 1.0, messages=[said])
    file = PlayedFile(tmp_path)
    file.add(one)
    file.close()
    assert read_played(tmp_path) == {one.place: one}


async def test_what_failed_is_played_again(tmp_path: Path) -> None:
    def away(turn: int, messages: Sequence[Message]) -> str:
        raise PolicyFailed("policy: it is away")

    await played(tmp_path, away)
    episodes = await played(tmp_path, solves)
    assert {one.reward for one in episodes} == {1.0}
    assert {one.failure for one in read_played(tmp_path).values()} == {None}


async def test_a_folder_of_another_evaluation_is_not_gone_on_with(tmp_path: Path) -> None:
    await played(tmp_path / "a", solves)
    with pytest.raises(OtherSetting, match="of another seed, source"):
        open_folder(tmp_path / "a", replace(SETTING, seed=8, source="abc"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(OtherSetting, match="something else"):
        open_folder(tmp_path / "b", SETTING)


def test_a_folder_whose_writer_died_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / ".eval.json.part").write_text('{"model": "m"')
    open_folder(tmp_path, SETTING)
    assert read_setting(tmp_path) == SETTING.to_json()
    assert [one.name for one in tmp_path.iterdir()] == ["eval.json"]


async def test_two_policies_are_compared_task_by_task(tmp_path: Path) -> None:
    setting = replace(SETTING, samples=1)
    better = EvalReport(setting, await played(tmp_path / "a", solves, setting=setting))

    def solves_one(turn: int, messages: Sequence[Message]) -> str | int:
        return solves(turn, messages) if "Reach 3." in str(messages) else "no"

    worse = EvalReport(setting, await played(tmp_path / "b", solves_one, setting=setting))
    found = compare(better, worse)
    assert found is not None
    assert (found.mean, found.num_better, found.num_worse, found.p_value) == (0.75, 3, 0, 0.25)
    assert list(difference_lines(found, "a", "b"))[-1] == "  tasks        3 better, 0 worse, 1 alike"


def test_tasks_are_drawn_by_the_seed_without_repetition() -> None:
    drawn = chosen_tasks(1000, 50, 3)
    assert drawn == chosen_tasks(1000, 50, 3)
    assert len(set(drawn)) == 50
    assert drawn != chosen_tasks(1000, 50, 4)
    assert chosen_tasks(4, 100, 3) == [0, 1, 2, 3]
