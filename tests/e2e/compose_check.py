"""What a stack of containers must stand: `python -m tests.e2e.compose_check` while `docker compose up` is up.

A job that is submitted to the published port learns while a rollout worker and Redis are killed, and its model is
exported by the trainer, fetched from the API and evaluated; ``gspo`` of the image lists jobs; the wall around the
environments is tried from inside; with ``--agents`` a job of agents is trained while a gateway is killed; with
``--rolling`` every service is restarted in turn under a job, with ``--restore`` one goes on from a backup after its
data and Redis are gone. It needs `docker` and whatever that needs to find the engine, and, to kill from outside, to be
root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_core import __version__
from gspo_core.client import Client, ClientError
from gspo_core.spec_file import load_job_spec

ROOT = Path(__file__).parents[2]
MODEL = "/app/models/calculator-tiny"
POLL_S = 1.0
TARGETS = {"redis": 6379, "engine": 30000, "api": 8000}
"""What environments must not reach, and where it listens."""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close(); print('REACHED')"
ROLLING = ("environments", "rollout", "gateway", "engine", "trainer", "api", "redis")
PROBE_WALL = "from services.hosts.walls.tiers import WALLS, Tier; print(WALLS[Tier.WALL].refusal())"
JOB, AGENTS_JOB = (ROOT / "examples" / name / "job.yaml" for name in ("demo", "agent"))


class CheckFailed(Exception):
    """What was seen is not what must be."""


def compose(*words: str, check: bool = True) -> str:
    done = subprocess.run(["docker", "compose", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise CheckFailed(f"docker compose {' '.join(words)}: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip() if check else done.stdout + done.stderr


def containers(service: str) -> list[str]:
    return compose("ps", "--quiet", service).split()


def inspect(container: str, what: str) -> str:
    done = subprocess.run(
        ["docker", "inspect", "--format", what, container], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def kill(service: str) -> None:
    """As a crash: from outside, so that the engine starts it again."""
    container = containers(service)[0]
    pid, before = int(inspect(container, "{{.State.Pid}}")), inspect(container, "{{.State.StartedAt}}")
    os.kill(pid, signal.SIGKILL)
    wait(f"{service} to come up again", lambda: inspect(container, "{{.State.StartedAt}}") != before, 60)
    say(f"killed {service} (process {pid}); it was started again")


def wait(what: str, is_so: Callable[[], bool], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while not is_so():
        if time.monotonic() > deadline:
            raise CheckFailed(f"waited {most_s:.0f} s for {what}")
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Said:
    after_s: float
    load: float
    text: str


STARTED = time.monotonic()
SAID: list[Said] = []
"""What this run has said so far."""


def say(text: str) -> None:
    SAID.append(Said(time.monotonic() - STARTED, os.getloadavg()[0], text))
    print(f"[check {SAID[-1].after_s:5.0f}s] {text}", flush=True)


class Run:
    """One job and what became of it."""

    def __init__(self, client: Client, seed: int, steps: int, job: Path = JOB, model: str = MODEL) -> None:
        spec = load_job_spec(job)
        changes = {"model": model, "seed": seed, "steps": steps, "evaluation": {"tasks": 64, "every": steps}}
        self._client = client
        self._steps = steps
        self.id = client.create_job(spec.model_dump(mode="json", exclude_unset=True) | changes)["id"]
        say(f"submitted {self.id}: {steps} steps")

    def step(self) -> int:
        try:
            job = self._client.job(self.id)
        except ClientError as error:  # while Redis is away
            say(f"the API says: {error}")
            return -1
        if job["status"] in ("failed", "cancelled"):
            raise CheckFailed(f"the job {job['status']}: {job['status_reason']}")
        return self._steps if job["status"] == "succeeded" else min(int(job["step"]), self._steps - 1)

    def reaches(self, step: int, most_s: float = 600) -> None:
        wait(f"step {step}", lambda: self.step() >= step, most_s)
        say(f"step {self.step()}")

    def groups(self) -> list[dict[str, Any]]:
        """Those that were trained."""
        return list(self._client.groups(self.id))

    def result(self) -> dict[str, Any]:
        """Of the finished job: success before and after, and whether each step and group was settled once."""
        events = list(self._client.events(self.id, after="0"))
        evaluations = [event.data for event in events if event.type == "evaluation"]
        rows = self._client.metrics(self.id)
        numbers = [int(row["step"]) for row in rows if "reward/mean" in row]  # the others are evaluations
        if sorted(set(numbers)) != list(range(1, self._steps + 1)):
            raise CheckFailed(f"steps that were reported: {numbers}")
        groups = [group["group"] for group in self.groups()]
        if len(set(groups)) != len(groups):
            raise CheckFailed("a group was trained twice")
        scores = [float(one["reward/mean"]) for one in evaluations]
        return {"evaluations": evaluations, "scores": scores, "num_groups": len(groups), "events": events}


def check_wall() -> None:
    """From inside the service of environments nothing of the rest can be reached; from a rollout worker it can."""
    for service, port in TARGETS.items():
        addresses = [service]
        for container in containers(service):
            networks = json.loads(inspect(container, "{{json .NetworkSettings.Networks}}"))
            addresses += [network["IPAddress"] for network in networks.values() if network["IPAddress"]]
        for address in addresses:
            said = compose("exec", "-T", "environments", "python", "-c", REACH, address, str(port), check=False)
            if "REACHED" in said:
                raise CheckFailed(f"an environment reaches {service} at {address}:{port}")
        say(f"environments do not reach {service} ({', '.join(addresses)})")
    said = compose("exec", "-T", "environments", "python", "-c", REACH, "gateway", "8020", check=False)
    if "REACHED" not in said:
        raise CheckFailed(f"agents do not reach the gateway: {said}")
    for service in ("redis", "engine"):
        said = compose("exec", "-T", "rollout", "python", "-c", REACH, service, str(TARGETS[service]), check=False)
        if "REACHED" not in said:
            raise CheckFailed(f"the probe itself does not work: a rollout worker does not reach {service}: {said}")
    said = compose("exec", "-T", "environments", "python", "-c", REACH, "1.1.1.1", "53", check=False)
    if "REACHED" in said:
        raise CheckFailed("an environment reaches the internet")
    held = compose("exec", "-T", "environments", "sh", "-c", "cat /proc/1/environ | tr '\\0' '\\n'; ls /secrets")
    lines = [
        line for line in held.splitlines() if any(word in line.lower() for word in ("redis", "api_key", "env_token"))
    ]
    if [line for line in lines if line != "gspo_env_token_sha256"]:
        raise CheckFailed(f"the service of environments holds {lines}")
    say("environments hold no secret and reach no other network")


def check_tier() -> None:
    """Whether each host of environments has a wall of its own is said at the start, and is so where it is demanded."""
    refusal = compose("exec", "-T", "environments", "python", "-c", PROBE_WALL)
    demanded = compose("exec", "-T", "environments", "printenv", "GSPO_ENV_TIER", check=False).strip()
    is_told = "this machine offers no wall" in compose("logs", "environments")
    if is_told != (refusal != "None" and demanded != "process"):
        raise CheckFailed(f"the log says that there is no wall: {is_told}; what is so: {refusal}")
    if demanded == "wall" and refusal != "None":
        raise CheckFailed(f"GSPO_ENV_TIER=wall, and there is none: {refusal}")
    say(f"a wall inside the container of environments: {'yes' if refusal == 'None' else f'no, and told: {refusal}'}")


def check_command(key: str) -> None:
    """``gspo`` in the image: of this version, and it reaches the API."""
    version = compose("exec", "-T", "api", "gspo", "version")
    if version != __version__:
        raise CheckFailed(f"gspo in the image is of version {version!r}, not {__version__}")
    jobs = compose("exec", "-T", "-e", f"GSPO_API_KEY={key}", "api", "gspo", "jobs")
    if "no jobs yet" not in jobs and not jobs.startswith("ID "):
        raise CheckFailed(f"gspo jobs in the image says {jobs!r}")
    refused = compose("exec", "-T", "api", "gspo", "jobs", check=False)
    if "missing_key" not in refused:
        raise CheckFailed(f"gspo jobs in the image without a key says {refused!r}")
    say(f"gspo in the image is {version}, and lists jobs: {jobs.splitlines()[0]}")


def check_hardening() -> None:
    """Every running container of ours: not root, read-only root, no capabilities, no published port of Redis."""
    for container in compose("ps", "--quiet").split():
        name = inspect(container, "{{.Name}}")
        config = json.loads(inspect(container, "{{json .HostConfig}}"))
        user = inspect(container, "{{.Config.User}}")
        if user in ("", "0", "root") or not config["ReadonlyRootfs"] or config["CapDrop"] != ["ALL"]:
            raise CheckFailed(
                f"{name} runs as {user!r}, read-only {config['ReadonlyRootfs']}, drops {config['CapDrop']}"
            )
        ports = {one["HostIp"] for bindings in (config["PortBindings"] or {}).values() for one in bindings}
        if ports - {"127.0.0.1"} or ("redis" in name and ports):
            raise CheckFailed(f"{name} publishes on {ports}")
    say("every container runs as an ordinary user on a read-only root without capabilities")


def learn_under_fire(client: Client, seed: int, steps: int, gain_points: float) -> None:
    run = Run(client, seed, steps)
    run.reaches(max(1, steps // 5))
    kill("rollout")
    run.reaches(max(2, steps // 2))
    kill("redis")
    run.reaches(steps)
    result = run.result()
    before, after = result["scores"][0], result["scores"][-1]
    say(f"held-out success {before:.0%} before, {after:.0%} after {steps} steps; {result['num_groups']} groups")
    if 100 * (after - before) < gain_points:
        raise CheckFailed(f"it rose by {100 * (after - before):.0f} points; {gain_points:.0f} were expected")
    export(client, run)


def exported(client: Client, run: Run) -> tuple[str, str]:
    """The newest checkpoint, and where its model lies in containers that hold the data: asked of the API."""
    wait("a checkpoint", lambda: next(client.checkpoints(run.id), None) is not None, 300)
    checkpoint, started = next(client.checkpoints(run.id))["id"], time.monotonic()
    client.export_checkpoint(checkpoint)
    wait("the export", lambda: client.checkpoint(checkpoint)["export"]["status"] != "exporting", 300)
    found = client.checkpoint(checkpoint)["export"]
    if found["status"] != "ready":
        raise CheckFailed(f"the export of {checkpoint} is {found['status']}: {found['message']}")
    say(f"a trainer exported {found['path']} {time.monotonic() - started:.0f} s after the API was asked for it")
    return checkpoint, f"/data/{found['path']}"


def fetch(client: Client, checkpoint: str, sums: str) -> None:
    """From the API, and compare it with what ``sums_of`` its directory said."""
    expected = {Path(line.split()[1]).as_posix(): line.split()[0] for line in sums.splitlines()}
    if missing := {"config.json", "model.safetensors", "tokenizer.json"} - expected.keys():
        raise CheckFailed(f"the export holds {sorted(expected)}, without {sorted(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        model = client.fetch_export(checkpoint, Path(folder) / "model")
        took_s, files = time.monotonic() - started, [file for file in model.rglob("*") if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        if {file.relative_to(model).as_posix(): digest(file) for file in files} != expected:
            raise CheckFailed(f"what the API gave is not what lies there: {expected}")
    say(f"fetched it from the API, {num_bytes / 1e6:.1f} MB in {took_s:.1f} s, byte for byte what lies there")


def sums_of(directory: str) -> list[str]:
    """The command that says them where the directory lies, with names below it."""
    return ["sh", "-c", f"cd {directory} && find . -type f -exec sha256sum {{}} +"]


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def export(client: Client, run: Run) -> None:
    checkpoint, lies_in = exported(client, run)
    fetch(client, checkpoint, compose("exec", "-T", "trainer", *sums_of(lies_in)))
    world = ("--env", "environments.calculator:Calculator", "--n", "20", "--out", "/tmp/evaluated")
    said_success("trainer", compose("exec", "-T", "trainer", "gspo", "eval", lies_in, *world))


def said_success(where: str, said: str) -> None:
    scored = [" ".join(line.split()) for line in said.splitlines() if line.split()[:1] == ["success"]]
    if len(scored) != 1:
        raise CheckFailed(f"gspo eval in {where}: {said}")
    say(f"gspo eval of it in {where}, on 20 tasks: {scored[0]}")


def train_agents(client: Client, seed: int, steps: int = 6) -> None:
    """A job of agents while a gateway is killed: what it held is played by another one, or again."""
    run = Run(client, seed, steps, AGENTS_JOB)
    run.reaches(2)
    kill("gateway")
    run.reaches(steps)
    num_groups, num_gateways = run.result()["num_groups"], len(containers("gateway"))
    say(f"agents: {steps} steps, {num_groups} groups; one of {num_gateways} gateways was killed")


def rolling_restart(client: Client, seed: int) -> None:
    """Every service is restarted in order while a job runs; nothing is lost, doubled or sampled again."""
    steps = 2 * len(ROLLING) + 4
    run = Run(client, seed, steps)
    for number, service in enumerate(ROLLING):
        run.reaches(2 * number + 1)
        started = time.monotonic()
        compose("restart", service)
        say(f"restarted {service} in {time.monotonic() - started:.0f} s")
    run.reaches(steps)
    result = run.result()
    attempts = [int(episode["attempt"]) for episode in client.episodes(run.id)]
    if any(attempts):
        raise CheckFailed(f"{sum(map(bool, attempts))} of {len(attempts)} episodes started again")
    say(f"{steps} steps, {result['num_groups']} groups, no episode started again: {', '.join(ROLLING)} were restarted")


def restore(client: Client, seed: int) -> None:
    """A backup is made under a running job; data and Redis are removed, and the job goes on from it."""
    steps = 40  # it must not be over before it is saved
    run = Run(client, seed, steps)
    run.reaches(4)
    started = time.monotonic()
    saved = subprocess.run(
        ["docker", "compose", "exec", "-T", "api", "python", "-m", "services.files.backup"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    say(
        f"saved {len(saved.stdout) / 1e6:.1f} MB in {time.monotonic() - started:.0f} s: {saved.stderr.decode().strip()}"
    )
    compose("down")
    for volume in ("gspo_data", "gspo_redis"):
        subprocess.run(["docker", "volume", "rm", volume], capture_output=True, check=True)
    command = [
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "--entrypoint",
        "python",
        "api",
        "-m",
        "services.files.backup",
        "--restore",
    ]
    subprocess.run(["docker", "compose", *command], cwd=ROOT, input=saved.stdout, check=True)
    compose("up", "--detach", "--wait", "--wait-timeout", "600")  # as long as with_compose.sh
    say(f"everything is there again, from the backup and an empty Redis; the job is at step {run.step()} of {steps}")
    run.reaches(steps)
    trained = list(client.groups(run.id))
    numbers, taken = {one["group"] for one in trained}, {one["step"] for one in trained}
    if len(numbers) != len(trained) or taken != {*range(1, steps + 1)}:
        raise CheckFailed(f"steps and groups after the restore: {[(one['step'], one['group']) for one in trained]}")
    say(f"the job that was saved at step 4 or later has its {steps} steps, each group trained once")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.compose_check")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gain", type=float, default=15.0, help="points of held-out success (default: %(default)s)")
    parser.add_argument("--agents", action="store_true", help="also train agents while a gateway is killed")
    parser.add_argument("--rolling", action="store_true", help="also restart every service under a second job")
    parser.add_argument("--restore", action="store_true", help="also restore a backup under a third job")
    given = parser.parse_args(arguments)
    try:
        check_hardening()
        check_tier()
        check_wall()
        key = compose("exec", "-T", "api", "cat", "/secrets/gspo_api_keys")
        check_command(key)
        with Client(given.url, key) as client:
            learn_under_fire(client, given.seed, given.steps, given.gain)
            check_wall()
            check_command(key)
            if given.agents:
                train_agents(client, given.seed + 3)
            if given.rolling:
                rolling_restart(client, given.seed + 1)
            if given.restore:
                restore(client, given.seed + 2)
    except CheckFailed as error:
        print(f"compose_check: {error}", file=sys.stderr)
        print(compose("logs", "--tail", "15", check=False), file=sys.stderr)
        return 1
    say("all of it holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
