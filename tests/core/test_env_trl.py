"""Classes written for TRL's trainer: they run as they are, and the policy reads what TRL would have let it read."""

from __future__ import annotations

import enum
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from gspo_core.env import EnvironmentFailed, InvalidEnvironment, PlainEnvironment, Timeouts, from_trl, load_environment
from gspo_core.env.trl import TrlDialect
from gspo_core.types import Split, StopReason
from tests.core.env_kit import call, play
from tests.patience import HANG_S


class Doubling:
    """Nobody reads this: TRL ignores docstrings of classes."""

    def __init__(self) -> None:
        self._value = 1

    def reset(self, **row: Any) -> str | None:
        self._value, self.row = 1, row
        return " Start from 1."

    def double(self, times: int) -> dict[str, int]:
        """Double the value.

        Args:
            times: how often
        """
        if times > 9:
            raise ValueError("too often")
        self._value <<= times
        return {"value": self._value}

    @staticmethod
    def shout(text: str) -> str:
        """Say it louder.

        Args:
            text: what
        """
        return text.upper()

    @classmethod
    def of_class(cls) -> str:
        return "not a tool in TRL"

    def get_reward(self) -> float:
        return self._value / 8


class Guessing:
    """One that keeps its reward for a reward function to read, and ends by raising."""

    def reset(self, word: str, **_: Any) -> None:
        self.word, self.reward, self.done = word, 0.0, False

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: five letters
        """
        if self.done:
            raise ValueError("Game over.")
        self.reward = float(word == self.word)
        return "right" if self.reward else "wrong"


def from_state(environments: list[Any], **_: Any) -> list[float]:
    return [environment.reward for environment in environments]


def length(completions: list[list[Any]], prompts: list[Any], word: list[str]) -> list[float]:
    assert [len(completions), len(prompts), len(word)] == [1, 1, 1]
    return [float(len(completions[0]))]


ROW = {"prompt": [{"role": "user", "content": "Guess."}], "word": "crane"}


async def test_a_class_runs_unchanged_and_reads_in_the_words_of_trl() -> None:
    played = await play(
        from_trl(Doubling),
        call("double", times=2),
        call("double", times=10),
        call("halve"),
        call("double", times="x"),
        call("double", often=1),
        call("shout", text="so"),
        "done",
    )
    assert played.first == [{"role": "user", "content": " Start from 1."}]
    assert played.tools == ["double", "shout"]
    assert [message["content"] for message in played.answers] == [
        "{'value': 4}",
        "{'error': 'too often'}",
        "{'error': 'Tool halve not found.'}",
        """{'error': "'>' not supported between instances of 'str' and 'int'"}""",
        """{'error': "Doubling.double() got an unexpected keyword argument 'often'"}""",
        "SO",
    ]
    assert set(played.answers[0]) == {"role", "name", "content"}
    assert (played.reward, played.parts) == (0.5, {"Doubling": 0.5})


async def test_named_directly_the_same_class_is_answered_in_our_words() -> None:
    played = await play(
        PlainEnvironment(Doubling, {}, name="d"), call("double", times=2), call("double", times="x"), "x"
    )
    assert [message["role"] for message in played.first] == ["system", "user"]
    assert [message["content"] for message in played.answers] == [
        '{"value":4}',
        "error: times must be integer, not string",
    ]


async def test_reward_functions_see_the_instance_the_columns_and_the_conversation() -> None:
    environment = from_trl(Guessing, dataset=[ROW], eval_dataset=[ROW, ROW], reward_funcs=[from_state, length])
    assert [environment.num_tasks(split) for split in Split] == [1, 2]
    played = await play(environment, call("guess", word="slate"), call("guess", word="crane"), "It was crane.")
    assert played.first == ROW["prompt"]
    assert (played.reward, played.parts) == (6.0, {"from_state": 1.0, "length": 5.0})
    assert ROW == {"prompt": [{"role": "user", "content": "Guess."}], "word": "crane"}  # rows are never touched


class Asking:
    """Without tools: one answer is the episode."""

    def reset(self, **_: Any) -> None: ...


class Chatting(Asking):
    def on_message(self, text: str) -> str | None:
        return None if text == "bye" else "Go on."


def handed(seen: list[Any]) -> Any:
    def of_all(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.extend((prompts, completions))
        return [float(len(completions[0]))]

    return of_all


async def test_reward_functions_get_texts_where_the_prompt_is_a_text() -> None:
    seen: list[Any] = []
    rows = [{"prompt": "Say it."}, {"prompt": [{"role": "user", "content": "Say it."}]}]
    environment = from_trl(Asking, dataset=rows, reward_funcs=handed(seen))
    assert (await play(environment, "It is said.")).reward == len("It is said.")
    assert (await play(environment, "It is said.", index=1)).reward == 1.0
    assert seen[:2] == [["Say it."], ["It is said."]]
    assert seen[2:] == [
        [[{"role": "user", "content": "Say it."}]],
        [[{"role": "assistant", "content": "It is said."}]],
    ]


async def test_the_text_of_a_prompt_holds_what_reset_adds_and_nothing_said_is_no_text() -> None:
    class Adding(Asking):
        def reset(self, **_: Any) -> str:  # type: ignore[override]
            return " Now."

    seen: list[Any] = []
    assert (await play(from_trl(Adding, dataset=[{"prompt": "Say it."}], reward_funcs=handed(seen)))).reward == 0.0
    assert seen == [["Say it. Now."], [""]]


@pytest.mark.parametrize(("cls", "turns"), [(Guessing, ["a"]), (Chatting, ["a", "bye"])])
async def test_where_a_world_answers_they_get_messages_whatever_the_prompt_is(cls: type, turns: list[str]) -> None:
    seen: list[Any] = []
    rows = [{"prompt": "Say it.", "word": "a"}]
    await play(from_trl(cls, dataset=rows, reward_funcs=handed(seen)), *turns)
    assert seen[0] == [[{"role": "user", "content": "Say it."}]]
    assert [message["content"] for message in seen[1][0] if message["role"] == "assistant"] == turns


async def test_a_row_chooses_among_several_classes_and_sees_only_their_tools() -> None:
    rows = [{"environment": "double", "x": 1}, {"environment": "guess", **ROW}, {"environment": "chess"}]
    environment = from_trl({"double": Doubling, "guess": Guessing}, dataset=rows, reward_funcs=lambda_free)
    first, second = await play(environment, "a", index=0), await play(environment, "b", index=1)
    assert (first.tools, second.tools) == (["double", "shout"], ["guess"])
    assert (first.parts, second.parts) == ({"lambda_free": 0.0, "Doubling": 0.125}, {"lambda_free": 0.0})
    with pytest.raises(EnvironmentFailed, match="asks for the environment 'chess'"):
        await play(environment, index=2)


def lambda_free(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


async def test_a_source_that_does_not_score_is_left_out_and_one_must() -> None:
    def silent(**_: Any) -> list[None]:
        return [None]

    played = await play(from_trl(Doubling, reward_funcs=silent), "x")
    assert played.parts == {"Doubling": 0.125}
    with pytest.raises(EnvironmentFailed, match=r"none of \['silent'\] scored"):
        await play(from_trl(Guessing, dataset=[ROW], reward_funcs=silent), "x")

    def broken(**_: Any) -> list[float]:
        return [float("nan")]

    with pytest.raises(EnvironmentFailed, match="not a finite number"):
        await play(from_trl(Guessing, dataset=[ROW], reward_funcs=broken), "x")


class Ledger:
    """One whose connection serves the thread alone that opened it."""

    def reset(self, **_: Any) -> None:
        self.rows = sqlite3.connect(":memory:")
        self.rows.execute("create table paid (amount)")

    def pay(self, amount: int) -> None:
        """Pay.

        Args:
            amount: how much
        """
        self.rows.execute("insert into paid values (?)", (amount,))

    def close(self) -> None:
        self.rows.close()


async def test_reward_functions_run_in_the_thread_of_the_instance() -> None:
    def paid(environments: list[Any], **_: Any) -> list[float]:
        return [float(one.rows.execute("select sum(amount) from paid").fetchone()[0]) for one in environments]

    environment = from_trl(Ledger, dataset=[ROW], reward_funcs=paid)
    assert (await play(environment, call("pay", amount=3), "done")).reward == 3.0


async def test_a_reward_function_that_raises_or_overruns_fails_the_episode() -> None:
    def raising(**_: Any) -> list[float]:
        raise OSError("the scales are broken")

    with pytest.raises(EnvironmentFailed, match="the scales are broken"):
        await play(from_trl(Doubling, reward_funcs=raising), "x")

    ended = threading.Event()

    def overrunning(**_: Any) -> list[float]:
        ended.wait(HANG_S)
        return [1.0]

    session = from_trl(Doubling, reward_funcs=[overrunning]).session(limits=Timeouts(score_timeout_s=0.05))
    await session.start({}, seed=0)
    with pytest.raises(EnvironmentFailed, match=r"timed out after 0\.05s"):
        await session.score()
    assert session.is_stuck
    await session.close()
    ended.set()


def paying(amount: float, name: str = "reward") -> Any:
    def reward(**_: Any) -> list[float]:
        return [amount]

    reward.__name__ = name
    return reward


async def test_reward_functions_of_one_name_all_count() -> None:
    functions = [paying(1), paying(2), paying(4, "reward_2"), paying(8), paying(16, "Doubling"), lambda **_: [32]]
    played = await play(from_trl(Doubling, reward_funcs=functions), "x")
    assert played.parts == {
        "reward": 1,
        "reward_3": 2,
        "reward_2": 4,
        "reward_4": 8,
        "Doubling": 16,
        "<lambda>": 32,
        "Doubling_2": 0.125,
    }
    assert played.reward == 63.125


def test_two_tools_of_one_name_are_refused() -> None:
    def double(times: int) -> int:
        """Another.

        Args:
            times: how often
        """
        return times

    with pytest.raises(InvalidEnvironment, match="trl: two tools are named plain_one"):
        from_trl(tools=[plain_one, plain_one], dataset=[ROW], reward_funcs=length)
    with pytest.raises(InvalidEnvironment, match="trl: two tools are named double"):
        from_trl(Doubling, tools=[double])


def test_what_cannot_be_run_is_refused_at_once() -> None:
    def of_ids(completion_ids: list[Any]) -> list[float]:
        return [0.0 for _ in completion_ids]

    with pytest.raises(InvalidEnvironment, match="needs completion_ids"):
        from_trl(Doubling, reward_funcs=of_ids)
    with pytest.raises(InvalidEnvironment, match="reward models are not supported here"):
        from_trl(Doubling, reward_funcs=["a/model"])  # type: ignore[list-item]
    with pytest.raises(InvalidEnvironment, match=r"needs a method get_reward"):
        from_trl(Guessing, dataset=[ROW])
    with pytest.raises(InvalidEnvironment, match="need a dataset"):
        from_trl({"a": Doubling})


def test_a_list_is_text_like_any_result_unless_it_is_content_in_parts() -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image", "image": "x"}]
    assert TrlDialect().result(parts) is parts
    assert TrlDialect().result([{"type": "hotel", "stars": 5}]) == "[{'type': 'hotel', 'stars': 5}]"
    assert TrlDialect().result([1, None]) == "[1, None]"


class Answering(Doubling):
    def done(self, answer: str) -> str:
        """Hand in the answer.

        Args:
            answer: what it is
        """
        return answer


class Judging(Doubling):
    def done(self) -> bool:
        return self._value > 4


class Handing(Doubling):
    @staticmethod
    def done() -> str:
        """Hand in."""
        return "thank you"


@pytest.mark.parametrize("cls", [Answering, Judging, Handing])
def test_done_as_a_method_is_refused_with_what_to_do(cls: type) -> None:
    """A bound method is true, so that the first call would end every episode."""
    complaint = "done is an attribute or property.*name the tool otherwise"
    with pytest.raises(InvalidEnvironment, match=complaint):
        from_trl(cls)
    with pytest.raises(InvalidEnvironment, match=complaint):
        PlainEnvironment(cls, {}, name="mine")


async def test_a_finished_environment_can_be_named_in_a_job(tmp_path: Any) -> None:
    source = (
        "from gspo_core.env import from_trl\nfrom tests.core.test_env_trl import Doubling\nworld = from_trl(Doubling)\n"
    )
    (tmp_path / "mine.py").write_text(source)
    environment = load_environment(f"{tmp_path}/mine.py:world")
    played = await play(environment, call("double", times=3), "done")
    assert played.reward == 1.0
    assert played.observations[-1].stop_reason is StopReason.COMPLETED
    assert environment.describe()["num_tasks"] == {"train": 1, "eval": 0}
    with pytest.raises(InvalidEnvironment, match="takes no config"):
        load_environment(f"{tmp_path}/mine.py:world", {"a": 1})


class Colour(enum.Enum):
    RED = "r"
    BLUE = 2


def plain_one(x: int, y: float = 1.0) -> str:
    """Do it.

    At length,
    over lines.

    Args:
        x: a number
            of things
        y: another: one

    Returns:
        What came of it.

    Raises:
        ValueError: never
    """
    return ""


def choosing(colour: str, kind: Literal["a", 1], other: Colour) -> None:
    """Choose.
    Args:
        colour: one (choices: ["red", " blue "])
        kind: of it
        other: hue
    """


def optional(a: int | None, b: Optional[str] = None, c: str | int | None = None) -> dict[str, int] | None:  # noqa: UP045
    """Perhaps.

    Args:
        a: first
        b: second
        c: third
    """
    return None


def containers(
    a: list[list[int]], b: dict[str, float], c: tuple[int, str], d: list, e: dict, f: Any, g: list[str] | dict[str, int]
) -> list[Colour]:
    """Hold.

    Args:
        a: 1
        b: 2
        c: 3
        d: 4
        e: 5
        f: 6
        g: 7
    """
    return []


def nothing() -> Path:
    """Nothing."""
    return Path()


@pytest.mark.parametrize("function", [plain_one, choosing, optional, containers, nothing])
def test_a_tool_is_described_as_transformers_does(function: Any) -> None:
    """The very text of it, because the prompt is made of that."""
    from transformers.utils import get_json_schema

    environment = from_trl(tools=[function], dataset=[ROW], reward_funcs=length)
    assert json.dumps(list(environment.tools)) == json.dumps([get_json_schema(function)])


def test_a_method_is_described_as_transformers_does() -> None:
    from transformers.utils import get_json_schema

    assert [json.dumps(tool) for tool in from_trl(Doubling).tools] == [
        json.dumps(get_json_schema(getattr(Doubling(), name))) for name in ("double", "shout")
    ]


async def test_tools_alone_are_an_environment() -> None:
    async def later(text: str) -> str:
        """Wait.

        Args:
            text: what
        """
        return text * 2

    def right(completions: list[list[Any]], **_: Any) -> list[float]:
        return [float(completions[0][-1]["content"] == "xx")]

    environment = from_trl(tools=[later, plain_one], dataset=[ROW], reward_funcs=right)
    played = await play(environment, call("later", text="x"), call("plain_one", x="y"), call("later", text=1), "xx")
    assert played.tools == ["later", "plain_one"]
    assert [message["content"] for message in played.answers] == ["xx", "", "2"]
    assert played.reward == 1.0


async def test_tools_stand_before_those_of_the_class() -> None:
    environment = from_trl(Doubling, tools=[plain_one])
    played = await play(environment, call("plain_one", x=1), call("double", times=1), "done")
    assert played.tools == ["plain_one", "double", "shout"]
    assert played.reward == 0.25


def test_tools_alone_need_a_dataset_and_a_judge() -> None:
    with pytest.raises(InvalidEnvironment, match="a dataset and reward_funcs are needed"):
        from_trl(tools=[plain_one], dataset=[ROW])
