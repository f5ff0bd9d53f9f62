"""A trainer of two ranks trains what one of one rank trains, and survives what that one survives."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import uvicorn
from redis.asyncio import Redis
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gspo_core.learner import Learner
from gspo_core.log.records import AcceptedJob
from gspo_core.replay.past import Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.spec import JobSpec
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.job_records import JobRecords
from services.files.weights import WeightStore
from services.process.children import die_with_parent
from services.process.ports import free_port
from services.state.server import RedisServer
from services.trainer.building import make_learner
from tests.apparatus.processes import is_running
from tests.apparatus.scripted_engine import ScriptedEngine
from tests.apparatus.scripted_engine.protocol import answer
from tests.apparatus.warm_python import WarmPython
from tests.core.learner_support import largest_difference, make_sequences, weights, write_model
from tests.patience import HANG_S
from tests.services.trainer import ranked_process
from tests.services.trainer.loop_kit import Loop, a_loop, plain_loop
from tests.services.trainer.ranked_process import spec_of

pytestmark = pytest.mark.timeout(900)  # starting processes is slow on a busy machine
# Of what the weights moved by: sums over ranks come in another order.
TOLERANCE = 1e-3


def torchrun(*arguments: str, options: Sequence[str] = ()) -> list[str]:
    launcher = "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", *options
    return [sys.executable, *launcher, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, warm_python: WarmPython) -> Path:
    """The results of all cases, run once: starting processes takes most of the time."""
    root = tmp_path_factory.mktemp("ranks")
    write_model(root / "model", tie_word_embeddings=True)
    learner = make_learner(open_spec(root))
    learner.logged_step(ranked_process.batch(0))
    learner.save_state(root / "one" / "state")
    run_cases(root, redis_server, warm_python, "from_one_rank", "undisturbed")
    return root


def run_cases(root: Path, redis_server: RedisServer, warm_python: WarmPython, *cases: str) -> None:
    options = "--nproc-per-node", "2", "--master-port", str(free_port())
    _, *words = torchrun(str(ranked_process.__file__), str(root), redis_server.url, *cases, options=options)
    subprocess.run([warm_python.path, *words], env=environment(), check=True, timeout=800)


def open_spec(root: Path) -> JobSpec:
    return spec_of(root, objective=ranked_process.OPEN)


def of_one_rank(spec: JobSpec, state: Path) -> Learner:
    learner = make_learner(spec)
    learner.load_state(state)
    return learner


def newest(job_dir: Path) -> Path:
    return CheckpointStore(JobDir(job_dir)).newest_first()[0].learner_dir


def files_of(state: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in state.glob("rank-*.safetensors")}


def start(root: Path) -> dict[str, torch.Tensor]:
    return weights(make_learner(spec_of(root)))


def check_near(root: Path, two: dict[str, torch.Tensor], one: dict[str, torch.Tensor]) -> None:
    moved = largest_difference(start(root), one)
    assert moved > 1e-3, "something must have been trained"
    assert largest_difference(two, one) < TOLERANCE * moved


def test_the_same_job_ends_with_the_same_weights_as_on_one_rank(root: Path, tmp_path: Path) -> None:
    """And its state is taken over by one rank."""
    job_dir = root / "undisturbed" / "job"
    two, one = of_one_rank(spec_of(root), newest(job_dir)), plain_loop(spec_of(root), tmp_path)
    assert two.counters == one.counters
    check_near(root, weights(two), weights(one))
    assert BatchLog(JobDir(job_dir)).steps() == [(1, step) for step in range(1, spec_of(root).steps + 1)]
    store = WeightStore(JobDir(job_dir))
    published = store.manifest(store.versions()[-1])
    store.verify(published)
    assert [file.path for file in published.files if file.path.endswith(".safetensors")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    exported = make_learner(spec_of(root).model_copy(update={"model": str(store.path(published.version))}))
    assert largest_difference(weights(exported), weights(two)) == 0


def accepted(root: Path, case: str) -> Path:
    """The directory of a case's job, with its record as the control plane writes it."""
    job = root / case / "job"
    text = spec_of(root).model_dump_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    JobRecords(JobDir(job)).accept(AcceptedJob(text, digest, "2026-01-01T00:00:00.000Z"))
    return job


def test_steps_of_two_ranks_are_found_again_bit_for_bit_on_two(root: Path, warm_python: WarmPython) -> None:
    """And alike on one, which says so."""
    job = accepted(root, "undisturbed")
    gspo = str(Path(sys.executable).with_name("gspo"))
    options = ["--no-python", "--nproc-per-node", "2", "--master-port", str(free_port())]
    _, *words = torchrun(str(warm_python.path), gspo, "replay", f"{job}@2-4", "--json", options=options)
    done = subprocess.run(
        [warm_python.path, *words], env=environment(), check=True, timeout=800, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found["is_same"], found
    assert [len(step["versions"]) for step in found["steps"]] == [1, 1, 1]
    said: list[str] = []
    alone = replay(Past(job), ReplayQuestion(2, 2), said.append)
    assert not alone.is_same
    assert any("number of ranks was 2 and is 1 here" in text for text in said)
    assert alone.steps[0].loss == pytest.approx(found["steps"][0]["loss"], rel=1e-4, abs=1e-7)


def test_a_fork_that_two_ranks_feed_with_their_batches_ends_at_their_weights(root: Path) -> None:
    assert [at.step for at in BatchLog(JobDir(root / "forked")).steps()] == [3, 4]
    assert (child := files_of(newest(root / "forked")))
    assert child == files_of(newest(root / "undisturbed" / "job"))


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_points_ends_bit_for_bit_where_an_undisturbed_one_does(
    root: Path, redis_server: RedisServer, warm_python: WarmPython
) -> None:
    """Redis is wiped twice on the way."""
    run_cases(root, redis_server, warm_python, "killed")
    assert len(json.loads((root / "killed" / "points.json").read_text())) > 2
    killed, undisturbed = (files_of(newest(root / case / "job")) for case in ("killed", "undisturbed"))
    assert len(killed) == 2
    assert killed == undisturbed


def test_a_rank_that_does_not_see_a_step_is_told_before_any_waits_for_it(
    root: Path, redis_server: RedisServer, warm_python: WarmPython
) -> None:
    run_cases(root, redis_server, warm_python, "unseen")
    told = (root / "unseen.txt").read_text()
    assert told.startswith("rank 1: BatchLogNotFound: ")
    assert "all ranks must share the same GSPO_DATA_DIR" in told


def test_two_ranks_go_on_from_a_state_of_one(root: Path) -> None:
    learner = of_one_rank(open_spec(root), root / "one" / "state")
    learner.logged_step(ranked_process.batch(1))
    _, metrics = learner.logged_step(ranked_process.batch(2))
    found = json.loads((root / "two" / "found.json").read_text())
    assert found["metrics"] == pytest.approx(metrics, rel=1e-3, abs=1e-4)
    scores = [float(one.sum()) for one in learner.logprobs(make_sequences(ranked_process.NUM_EPISODES))]
    assert found["scores"] == pytest.approx(scores, rel=1e-4)
    files = map(load_file, sorted((root / "two" / "weights").glob("*.safetensors")))
    two = {f"model.{name}": tensor for file in files for name, tensor in file.items()}
    check_near(root, two, weights(learner))


def test_what_one_rank_cannot_do_is_told_and_the_learner_stays_as_it_was(root: Path) -> None:
    """That it goes on rightly is seen by the test before."""
    found = json.loads((root / "two" / "found.json").read_text())
    assert found["lost"].startswith("ValueError: rank 1: InvalidState: ")
    assert "damaged" in found["lost"]
    assert found["write"].startswith("FileExistsError: [Errno 17] rank 1: ")
    assert found["retune"].startswith("ValueError: of the optimizer only lr")


# Killed ranks


@contextlib.asynccontextmanager
async def served(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The engine over HTTP, for processes other than this one; its URL."""

    async def handle(request: Request) -> Response:
        body = await request.body()
        status, answered = await answer(engine, request.method, request.url.path, request.query_params, body)
        return Response(answered, status)

    port = free_port()
    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False, lifespan="off"))
    # Signals are those of the tests.
    serving = asyncio.create_task(server._serve())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@contextlib.contextmanager
def torchrun_trainer(
    tmp_path: Path, redis_url: str, engine_url: str, num_machines: int, python: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``python -m services.trainer`` on two ranks, started again when one is lost; nothing of it is left behind.

    On two machines, as it were: each has a launcher that sees its own rank alone. The ranks are started as ``python``.
    """
    settings = {"REDIS_URL": redis_url, "DATA_DIR": str(tmp_path), "ENGINE_URLS": engine_url, "LEASE_S": "5"}
    settings |= {"HEALTH_FILE": str(tmp_path / "health"), "LOG_FORMAT": "json"}
    options = ["--nnodes", str(num_machines), "--nproc-per-node", str(2 // num_machines)]
    options += ["--master-port", str(free_port()), "--max-restarts", "9", "--monitor-interval", "0.2"]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for machine in range(num_machines):
            with (tmp_path / f"trainer-{machine}.log").open("wb") as log:
                argv = torchrun("--module", "services.trainer", options=[*options, "--node-rank", str(machine)])
                variables = environment() | {f"GSPO_{name}": value for name, value in settings.items()}
                variables["PYTHON_EXEC"] = str(python)
                running.append(
                    subprocess.Popen(
                        argv, env=variables, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent()
                    )
                )
        yield running
    finally:
        ranks = ranks_of(running)
        for one in running:
            one.terminate()
        for one in running:
            try:
                one.wait(HANG_S)
            finally:
                one.kill()
        left = [pid for pid in ranks.values() if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, "asked to leave, all ranks do"


def ranks_of(running: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Rank -> process, of those that the launchers have running."""
    found, launchers = {}, {one.pid for one in running}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError, StopIteration):
            if entry.name.isdecimal() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in launchers:
                variables = (entry / "environ").read_bytes().split(b"\0")
                rank = next(one for one in variables if one.startswith(b"RANK="))
                found[int(rank.removeprefix(b"RANK="))] = int(entry.name)
    return found


@pytest.mark.parametrize(
    ("num_machines", "victims"),
    [(1, [1]), pytest.param(1, [0, 1, 0], marks=pytest.mark.slow), pytest.param(2, [1, 0], marks=pytest.mark.slow)],
)
async def test_a_trainer_whose_ranks_are_killed_trains_every_step_once(
    root: Path,
    tmp_path: Path,
    redis_client: Redis,
    redis_server: RedisServer,
    warm_python: WarmPython,
    monkeypatch: pytest.MonkeyPatch,
    num_machines: int,
    victims: list[int],
) -> None:
    """Bit for bit to where an undisturbed one comes."""
    spec = spec_of(root)
    async with (
        a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop,
        served(loop.transport.engines["engine"]) as url,
    ):
        with torchrun_trainer(tmp_path, redis_server.url, url, num_machines, warm_python.path) as running:
            async with asyncio.timeout(500):
                for step, victim in enumerate(victims, 1):
                    await reached(loop, step)
                    while victim not in (ranks := ranks_of(running)):
                        await asyncio.sleep(0.1)
                    os.kill(ranks[victim], signal.SIGKILL)
                while not (job := await loop.store.jobs.get(loop.job)).status.is_terminal:
                    await asyncio.sleep(0.1)
    assert job.status == "succeeded", job.status_reason
    assert len(job.attempts) > 1
    if num_machines > 1:  # nobody told the first rank
        assert "rank_lost" in [one.code for one in job.attempts]
    assert sorted({step for _, step in BatchLog(JobDir(loop.job_dir)).steps()}) == list(range(1, spec.steps + 1))
    counts = await loop.bus.counters(loop.job)
    assert counts["trained"] == spec.steps * spec.groups_per_step
    assert counts["in_flight"] == 0
    assert files_of(newest(loop.job_dir)) == files_of(newest(root / "undisturbed" / "job"))


async def reached(loop: Loop, step: int) -> None:
    while (await loop.store.jobs.get(loop.job)).step < step:
        await asyncio.sleep(0.05)
