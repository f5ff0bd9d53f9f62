"""A job whose model cannot be trained is refused at its submission where somebody sees the files, and never else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.api.submission import submit as submitting
from services.files.data_dir import EnvironmentsDir
from services.files.environments.registry import EnvironmentRegistry
from services.hosts.local import LocalHosts
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.rollout.request_runner import RequestRunner
from services.state import process_requests
from services.state.fleet_records import WorkerRecord
from services.state.process_requests import WorkerRequest, WorkerRequests
from services.state.queue import Bus
from services.state.store import Store
from tests.core.test_model_files import SOUND, write_files
from tests.services.api.api_kit import SPEC, application, error_of, http_to
from tests.services.rollout.rollout_kit import write_model


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


@pytest.fixture
async def worker(bus: Bus, store: Store, tmp_path: Path) -> AsyncIterator[None]:
    """A registered rollout worker that takes requests, in this process."""
    await store.fleet.register_worker(WorkerRecord(id="worker-0"))
    sites = Sites(EnvironmentRegistry(EnvironmentsDir(tmp_path / "environments")))
    runner = RequestRunner(WorkerRequests(bus._redis), sites, LocalHosts(Interpreters(tmp_path / "venvs")), "worker-0")
    running = asyncio.create_task(runner.run())
    yield
    await cancel_all([running])


async def submit(http: httpx.AsyncClient, model: Path | str, key: str = "", **query: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await http.post("/v1/jobs", json=SPEC | {"model": str(model)}, params=query, headers=headers)


@pytest.mark.usefixtures("worker")
async def test_what_can_be_no_directory_is_no_model(http: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for model in (tmp_path / "loop", f"{tmp_path}/a\0b"):
        answer = await submit(http, model, dry_run=True)
        assert (answer.status_code, error_of(answer)["code"]) == (422, "model_invalid"), model


@pytest.mark.usefixtures("worker")
async def test_a_model_that_no_worker_sees_is_refused_at_once(http: httpx.AsyncClient, tmp_path: Path) -> None:
    for query in ({}, {"dry_run": True}):
        answer = await submit(http, tmp_path / "nope", **query)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (422, "model_invalid", "model")
        assert error["message"] == f"there is no directory {tmp_path}/nope (where rollout workers run)"
    assert (await http.get("/v1/jobs")).json()["data"] == []


@pytest.mark.usefixtures("worker")
async def test_a_name_of_the_hub_that_was_not_fetched_says_how(http: httpx.AsyncClient) -> None:
    error = error_of(await submit(http, Path("Owner/Name")))
    assert error["message"].endswith("if it is a model of the Hugging Face hub, run: gspo fetch Owner/Name")


@pytest.mark.usefixtures("worker")
async def test_a_model_that_workers_alone_see_is_accepted(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_files(tmp_path)
    monkeypatch.setattr("gspo_core.model_files.refusal_of", lambda path, calls: f"there is no directory {path}")
    assert (await submit(http, model)).status_code == 201


async def test_without_a_worker_what_is_not_here_may_be_there(http: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await submit(http, tmp_path / "nope")).status_code == 201


async def test_a_worker_that_does_not_answer_holds_nobody_up(
    http: httpx.AsyncClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an earlier release, which does not know the question."""
    monkeypatch.setattr(submitting, "LOOK_AT_MODEL_S", 0.2)
    await store.fleet.register_worker(WorkerRecord(id="worker-0"))
    assert (await submit(http, tmp_path / "nope")).status_code == 201


async def test_files_that_are_here_and_wrong_are_refused_without_asking(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = write_files(tmp_path, SOUND | {"final_logit_softcapping": 30.0})
    error = error_of(await submit(http, model))
    assert error["code"] == "model_invalid"
    assert error["message"] == "qwen3 sets final_logit_softcapping, which the log-probs do not follow"


async def test_a_model_that_sees_or_that_nothing_here_speaks_to_is_refused(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = write_files(tmp_path, SOUND | {"vision_config": {"depth": 2}})
    error = error_of(await submit(http, model))
    assert (error["code"], error["param"]) == ("model_invalid", "model")
    assert "has parts that see or hear (vision_config)" in error["message"]
    model = write_files(tmp_path)
    (model / "chat_template.jinja").write_text("{{ tools }}[TOOL_CALLS]")
    error = error_of(await submit(http, model))
    assert error["code"] == "model_invalid"
    assert error["message"].startswith(
        "the model's template writes tool calls as Mistral does, which nothing here reads"
    )
    spoken = SPEC | {"model": str(model), "chat": {"calls": "none"}}
    assert (await http.post("/v1/jobs", json=spoken)).status_code == 201


async def test_a_repetition_finds_its_job_whatever_became_of_the_model(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_files(tmp_path)
    first = await submit(http, model, "key")
    (model / "config.json").unlink()
    assert (await submit(http, model, "key")).json()["id"] == first.json()["id"]
    assert (await submit(http, model, "other")).status_code == 422


WORLD = """
class World:
    tasks = [{"words": 1}, {"words": WORDS}, {"words": 2}]

    def reset(self, words: int) -> str:
        return " so" * words

    def get_reward(self) -> float:
        return 0.0


class Painting(World):
    def reset(self, words: int):
        return [{"type": "image_url", "image_url": {"url": "data:,"}}]
"""


async def plan(http: httpx.AsyncClient, model: Path, ref: str, **changes: Any) -> dict[str, Any]:
    spec = {"model": str(model), "environments": [{"ref": ref}], **changes}
    answer: dict[str, Any] = (await http.post("/v1/jobs", params={"dry_run": True}, json=spec)).json()
    return answer


@pytest.mark.usefixtures("worker")
async def test_a_dry_run_says_by_how_much_a_prompt_is_too_long(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=0, stop_bias=0.0)
    world = tmp_path / "world.py"
    world.write_text(WORLD.replace("WORDS", "5000"))
    found = await plan(http, model, f"{world}:World")
    (warning,) = found["warnings"]
    assert re.fullmatch(
        r"environments\[0\]: the prompt of task 1 has \d+,\d{3} tokens; the model's context is 4,096", warning
    )
    assert [one.partition(":")[0] for one in found["unchecked"]] == ["model"]
    found = await plan(http, model, f"{world}:World", limits={"max_context_tokens": 600, "max_episode_tokens": 100})
    assert found["warnings"][-1].endswith("tokens; limits.max_context_tokens is 600")
    world.write_text(WORLD.replace("WORDS", "3"))
    assert (await plan(http, model, f"{world}:World"))["warnings"] == []


@pytest.mark.usefixtures("worker")
async def test_a_dry_run_says_that_images_are_not_read(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=0, stop_bias=0.0)
    (tmp_path / "world.py").write_text(WORLD.replace("WORDS", "1"))
    (warning,) = (await plan(http, model, f"{tmp_path}/world.py:Painting"))["warnings"]
    assert "a user message holds content of type image_url" in warning


async def test_without_a_worker_the_prompts_stay_unchecked(http: httpx.AsyncClient, tmp_path: Path) -> None:
    found = await plan(http, write_files(tmp_path), "environments.calculator:Calculator")
    assert "its prompts fit the model's context" in found["unchecked"][1]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("text", "said"), [(None, "no file"), ("class Other:\n    pass\n", "has no 'World'; its classes are ['Other']")]
)
async def test_a_world_that_neither_api_nor_worker_finds_is_refused(
    http: httpx.AsyncClient, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "world.py").write_text(text)
    ref = f"{tmp_path / 'world.py'}:World"
    body = SPEC | {"model": str(write_files(tmp_path)), "environments": [{"ref": ref}]}
    for query in ({}, {"dry_run": True}):
        answer = await http.post("/v1/jobs", json=body, params=query)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (422, "environment_invalid")
        assert error["param"] == "environments[0].ref"
        assert said in error["message"]
        assert (await http.get("/v1/jobs")).json()["data"] == []


@pytest.mark.usefixtures("worker")
async def test_a_world_that_one_of_two_workers_has_is_accepted(
    http: httpx.AsyncClient, bus: Bus, store: Store, tmp_path: Path
) -> None:
    """Although the one that has not takes whatever is asked of any."""
    await store.fleet.register_worker(WorkerRecord(id="worker-1"))
    other = WorkerRequests(bus._redis)

    async def knows() -> None:
        position = "0"
        while True:
            for _, orders in await bus._redis.xread({process_requests._ORDERS: position}, block=100):
                for entry, fields in orders:
                    position = entry.decode()
                    if fields[b"worker"] == b"worker-1":
                        await other.answer(WorkerRequest(position, {}, is_awaited=True), {"result": {}})

    running = asyncio.create_task(knows())
    try:
        world = [{"ref": f"{tmp_path / 'world.py'}:World"}]
        body = SPEC | {"model": str(write_files(tmp_path)), "environments": world}
        answer = await http.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
    finally:
        await cancel_all([running])


async def test_where_environments_run_in_hosts_nothing_is_refused_for_that(
    http: httpx.AsyncClient, bus: Bus, store: Store, tmp_path: Path
) -> None:
    """Workers then run none, and cannot say anything of one."""
    await store.fleet.register_worker(WorkerRecord(id="worker-0"))
    sites = Sites(EnvironmentRegistry(EnvironmentsDir(tmp_path / "environments")), elsewhere=True)
    running = asyncio.create_task(RequestRunner(WorkerRequests(bus._redis), sites, None, "worker-0").run())
    try:
        model, ref = write_files(tmp_path), f"{tmp_path / 'elsewhere.py'}:World"
        body = SPEC | {"model": str(model), "environments": [{"ref": ref}]}
        assert (await http.post("/v1/jobs", json=body)).status_code == 201
        found = await plan(http, model, ref)
        assert "GSPO_ENV_HOSTS" in found["warnings"][-1], found
    finally:
        await cancel_all([running])


async def test_a_world_that_this_process_does_not_see_is_accepted_while_no_worker_can_be_asked(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    ref = f"{tmp_path / 'elsewhere.py'}:World"
    answer = await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": ref}]})
    assert answer.status_code == 201


@pytest.mark.usefixtures("worker")
async def test_a_context_beyond_the_models_is_warned_of(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = write_files(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    body = SPEC | {
        "model": str(model),
        "limits": {"max_context_tokens": 1_000_000},
        "sampling": {"max_new_tokens": 2048},
    }
    plan = (await http.post("/v1/jobs", json=body, params={"dry_run": True})).json()
    said = "\n".join(plan["warnings"])
    assert "1,000,000 tokens, but the model's context is 1,024: episodes end there" in said
    assert "sampling.max_new_tokens: 2,048 tokens for a turn, but the model's context is 1,024" in said
    assert plan["estimate"]["max_sampled_tokens_per_step"] == 64 * 1024
