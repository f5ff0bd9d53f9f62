"""A job that can never train anything is told so within seconds, with its cause, and the next one has the trainer.

The whole stack, as ``gspo up`` starts it, with its one trainer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.demo import NO_KEYS
from gspo_core.client import ApiError, Client
from services.launch.stack import Stack, StackConfig
from tests.services.rollout.rollout_kit import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORLDS = """
class Fine:
    tasks = [{"number": number} for number in range(8)]

    def reset(self, number: int):
        return f"Say {number}."

    def get_reward(self) -> float:
        return float(id(self) % 7)


class Long(Fine):
    def reset(self, number: int):
        return " so" * 6000


class Painting(Fine):
    def reset(self, number: int):
        return [{"type": "image_url", "image_url": {"url": "data:,"}}]


class Away(Fine):
    def reset(self, number: int):
        raise OSError("no route to host")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path, Path]]:
    root = tmp_path_factory.mktemp("hopeless")
    model, worlds = write_model(root / "model", seed=0, stop_bias=0.0), root / "worlds.py"
    worlds.write_text(WORLDS)
    with (
        Stack(StackConfig(root / "data", model, port=0, environment=NO_KEYS)) as stack,
        Client(stack.api_url) as client,
    ):
        yield client, model, worlds


def spec(place: tuple[Client, Path, Path], world: str, **changes: Any) -> dict[str, Any]:
    _, model, worlds = place
    return {
        "model": str(model),
        "environments": [{"ref": f"{worlds}:{world}"}],
        "rollout": {"group_size": 2, "max_staleness": 1},
        "sampling": {"max_new_tokens": 8},
        "limits": {"max_turns": 1, "reset_timeout_s": 5},
        "groups_per_step": 2,
        "steps": 1,
        "resources": {"device": "cpu"},
    } | changes


@pytest.mark.parametrize(
    ("world", "code", "said"),
    [
        ("Long", "prompt_too_long", "the model's context is 4,096"),
        ("Painting", "images_unsupported", "holds content of type image_url"),
        ("Away", "environment_failed", "OSError: no route to host"),
    ],
)
def test_it_fails_with_its_cause_and_frees_the_trainer(
    place: tuple[Client, Path, Path], world: str, code: str, said: str
) -> None:
    client, begun = place[0], time.monotonic()
    hopeless = client.create_job(spec(place, world))["id"]
    behind = client.create_job(spec(place, "Fine"))["id"]
    for job, status in ((hopeless, "failed"), (behind, "succeeded")):
        for _ in client.events(job, after="0"):
            pass
        record = client.job(job)
        print(world, round(time.monotonic() - begun), record["status"], record["status_reason"])
        assert record["status"] == status, record["status_reason"]
    reason = client.job(hopeless)["status_reason"]
    assert reason["code"] == code
    assert said in reason["message"]


def test_a_model_that_is_not_there_is_refused_at_once(place: tuple[Client, Path, Path]) -> None:
    with pytest.raises(ApiError, match="there is no directory models/nope") as refusal:
        place[0].create_job(spec(place, "Fine", model="models/nope"))
    assert refusal.value.code == "model_invalid"
