"""Other forms of environments than a class, in processes of their own: TRL's and functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.env import Environment, EnvironmentFailed, InvalidEnvironment, Timeouts, from_trl, load_environment
from gspo_core.types import Split
from services.hosts.inside.traits import hosting_of, require_sandboxes
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from tests.core.env_kit import call, play

SOURCE = '''
from gspo_core.env import from_functions, from_trl


class Adding:
    def reset(self, start, **row):
        self.value = start

    def add(self, amount: int) -> int:
        """Add.

        Args:
            amount: how much
        """
        self.value += amount
        return self.value


def of_state(environments, goal, **columns):
    return [float(one.value == wanted) for one, wanted in zip(environments, goal)]


def half(number: int) -> float:
    """Halve it.

    Args:
        number: any
    """
    return number / 2


trl = from_trl(Adding, dataset=[{"prompt": "Make it 5.", "start": 3, "goal": 5}], reward_funcs=of_state)
Halving = from_functions(
    [half], tasks=[{"prompt": "Halve 3."}], reward=lambda task, messages, calls: float("1.5" in messages[-1]["content"])
)
'''


async def test_they_are_played_there_as_here(tmp_path: Path) -> None:
    (tmp_path / "forms.py").write_text(SOURCE)
    for name, turns, answer in (
        ("trl", (call("add", amount=2), "done"), "5"),
        ("Halving", (call("half", number=3), "It is 1.5."), "1.5"),
    ):
        environment = await HostedEnvironment.open(HostOrder(f"{tmp_path}/forms.py:{name}"))
        try:
            played = await play(environment, *turns)
        finally:
            await environment.close()
        assert [message["content"] for message in played.answers] == [answer]
        assert played.reward == 1.0


BY_ITSELF = """
from gspo_core.env import from_trl


class Chess:
    replayable = True
    hosting = {"sessions_per_process": 1, "memory_mb": 4096}

    def reset(self, **row):
        pass

    def get_reward(self):
        return 1.0


trl = from_trl(Chess)
"""


async def test_a_class_of_trl_is_hosted_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "chess.py").write_text(BY_ITSELF)
    environment = await HostedEnvironment.open(HostOrder(f"{tmp_path}/chess.py:trl"))
    try:
        described = environment.pool.description
    finally:
        await environment.close()
    assert (described.sessions_per_process, described.memory_mb) == (1, 4096)


class Quiet:
    def reset(self, **row: str) -> None: ...

    def get_reward(self) -> float:
        return 1.0


class Large(Quiet):
    hosting = {"memory_mb": 4096}  # noqa: RUF012
    limits = {"max_turns": 4}  # noqa: RUF012
    runs_in_sandboxes = True


class Patient(Quiet):
    hosting = {"memory_mb": 4096, "max_processes": 2}  # noqa: RUF012
    limits = {"step_timeout_s": 120}  # noqa: RUF012
    runs_in_sandboxes = True


class Hasty(Quiet):
    limits = {"step_timeout_s": 2}  # noqa: RUF012


class Small(Quiet):
    hosting = {"memory_mb": 64}  # noqa: RUF012


ROWS = [{"prompt": "Go.", "environment": "a"}]


def test_several_classes_of_trl_are_hosted_and_bounded_as_they_say_together() -> None:
    environment = from_trl({"a": Quiet, "b": Large, "c": Patient}, dataset=ROWS)
    limits = hosting_of(environment, {"max_processes": 3})
    assert (limits.memory_mb, limits.max_processes, limits.sessions_per_process) == (4096, 3, None)
    assert environment.limits == {"max_turns": 4, "step_timeout_s": 120}


def test_classes_of_trl_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(InvalidEnvironment, match="step_timeout_s is 120 for a and 2 for c"):
        from_trl({"a": Patient, "b": Quiet, "c": Hasty}, dataset=ROWS)
    with pytest.raises(InvalidEnvironment, match="memory_mb is 4096 for b and 64 for c"):
        from_trl({"a": Quiet, "b": Large, "c": Small}, dataset=ROWS)


def test_classes_of_trl_run_in_sandboxes_if_all_of_them_say_so() -> None:
    require_sandboxes(from_trl({"a": Large, "b": Patient}, dataset=ROWS))
    with pytest.raises(InvalidEnvironment, match="may only run in the tiers process and wall"):
        require_sandboxes(from_trl({"a": Large, "b": Quiet}, dataset=ROWS))


JUDGES = """
import asyncio

from gspo_core.env import from_trl


class Quiet:
    def reset(self, **row):
        pass


async def first(**_):
    await asyncio.sleep(0.9)
    return [1.0]


async def second(**_):
    await asyncio.sleep(0.9)
    return [1.0]


trl = from_trl(Quiet, dataset=[{"prompt": "Go."}], reward_funcs=[first, second])
"""


async def judged(environment: Environment) -> None:
    session = environment.session(limits=Timeouts(score_timeout_s=1.0))
    try:
        await session.start(await environment.task(Split.TRAIN, 0), seed=0)
        with pytest.raises(EnvironmentFailed, match=r"^timed out after 1s$|: timed out after 1s$"):
            await session.score()
    finally:
        await session.close()


async def test_judges_of_trl_share_the_time_there_as_here(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    await judged(load_environment(f"{tmp_path}/judges.py:trl"))
    environment = await HostedEnvironment.open(HostOrder(f"{tmp_path}/judges.py:trl"))
    try:
        await judged(environment)
    finally:
        await environment.close()
