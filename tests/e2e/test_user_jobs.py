"""What a user does with a running service: sends an environment, pauses, resumes and cancels, trains stale data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.demo.demo import NO_KEYS, demo_spec, run_demo
from gspo_core.client import Client
from services.launch.stack import Stack, StackConfig
from tests.e2e.test_learning import changed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OWN = Path(__file__).with_name("own_environment.py")
NUM_STEPS = 25
STALE = 8


@contextmanager
def service(data_dir: Path, model_dir: Path, **settings: str) -> Iterator[Client]:
    config = StackConfig(data_dir, model_dir, port=0, environment={**NO_KEYS, **settings})
    with Stack(config) as stack, Client(stack.api_url) as client:
        yield client


def held_out(client: Client, job: str) -> list[float]:
    """Success at each evaluation; waits for the job's end."""
    found = [event.data["reward/mean"] for event in client.events(job, after="0") if event.type == "evaluation"]
    record = client.job(job)
    assert record["status"] == "succeeded", record["status_reason"]
    return found


def test_an_environment_that_a_user_sends_as_a_file_is_learned(model_dir: Path, tmp_path: Path) -> None:
    evaluation = {"tasks": 30, "episodes_per_task": 8, "every": 1000}
    with service(tmp_path, model_dir, GSPO_ENV_UPLOADS="true") as client:
        sent = client.upload_environment("sums", f"{OWN.name}:Sums", OWN.read_bytes(), kind="text/x-python")
        changes: dict[str, Any] = {"environments": [{"ref": sent["id"]}], "evaluation": evaluation, "steps": NUM_STEPS}
        job = client.create_job(changed(demo_spec(model_dir, 0), changes))["id"]
        before, after = held_out(client, job)
        trained = next(iter(client.episodes(job)))
    print(before, after)
    assert after >= before + 0.2
    assert trained["id"].startswith(job)


def test_a_stale_run_learns_too(model_dir: Path, tmp_path: Path) -> None:
    given = demo_spec(model_dir, 0).model_dump(mode="json", exclude_unset=True)
    changes = {"rollout": {**given["rollout"], "max_staleness": STALE}, "steps": 50}
    result = run_demo(changed(demo_spec(model_dir, 0), changes), tmp_path, model_dir, quiet=True)
    print(result)
    # The first steps are young by nature: all that is under way was sampled by version 0.
    assert result.staleness_mean > STALE / 2
    assert result.gain >= 0.25
    assert result.provenance.num_equal == result.provenance.num_tokens


def test_a_job_is_paused_goes_on_and_another_is_cancelled(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), {"steps": 8, "evaluation": None, "groups_per_step": 4})
    with service(tmp_path, model_dir) as client:
        first, second, third = (client.create_job(changed(spec, {"name": name}))["id"] for name in ("a", "b", "c"))
        statuses, steps = list[str](), list[int]()
        for event in client.events(first, after="0"):
            if event.type == "step":
                steps.append(event.data["step"])
                if steps == [1, 2]:
                    client.pause(first)
            elif event.type == "job.status":
                statuses.append(event.data["status"])
                if statuses[-1] == "paused":
                    # It keeps its trainer, and what is queued behind it waits.
                    assert client.job(second)["status"] == "queued"
                    client.resume(first)
        assert client.job(first)["status"] == "succeeded"
        assert steps == list(range(1, 9))
        assert statuses.index("paused") < statuses.index("succeeded")
        for event in client.events(second, after="0"):
            if event.type == "step" and event.data["step"] == 1:
                client.cancel(second)
        assert client.job(second)["status"] == "cancelled"
        for _ in client.events(third, after="0"):
            pass
        assert client.job(third)["status"] == "succeeded"
