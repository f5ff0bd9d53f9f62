"""Other forms of environments than a class, in processes of their own: TRL's and functions."""

from __future__ import annotations

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


async def test_they_are_played_there_as_here(tmp_path) -> None:
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
