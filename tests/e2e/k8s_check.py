"""What the manifests must stand on a real cluster: `python -m tests.e2e.k8s_check`, with KUBECONFIG set, as root.

The policies are tried from inside the pods, without them and with them; a job that is submitted over the Service learns
while a worker's, the trainer's and Redis' pod are deleted; every workload is rolled under a second one; a third goes on
from a backup that its schedule began when its claims are gone; an engine more is used as soon as it answers. The API
has no torch, so the trainer exports what is asked of it: under a job, and when none trains. What a run of all
parts said becomes the last section of `benchmarks/results/k8s.md`.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gspo_core.client import Client
from services.launch.first_secrets import make_secrets
from tests.apparatus.k8s.lowered import lowered
from tests.e2e import k8s_report
from tests.e2e.compose_check import SAID, CheckFailed, Run, exported, fetch, said_success, say, sums_of, wait

HERE = Path(__file__).parents[1] / "apparatus" / "k8s"
OVERLAY = HERE / "overlay"
REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "k8s.md"
SECRETS = ("api", "engine", "trainer", "rollout", "gateway", "environments", "redis")
ORDER = ("redis", "environments", "engine", "api", "rollout", "gateway", "trainer", "announcer")
"""Workloads, in the order in which they are rolled."""
LEAVING = (("api", "rollout", "gateway", "announcer"), ("environments", "engine", "trainer"), ("redis",))
"""Who works with engines and environments goes first, and Redis, to which everything is handed back, goes last."""
KINDS = dict.fromkeys(("redis", "engine", "trainer"), "statefulset")
PORTS = {"redis": 6379, "engine": 30000, "api": 8000, "gateway": 8020, "environments": 8010}
CALLERS = {
    "redis": {"api", "gateway", "rollout", "trainer", "announcer"},
    "engine": {"gateway", "rollout", "trainer", "announcer"},
    "api": set[str](),
    "gateway": {"environments"},
    "environments": {"gateway", "rollout"},
    "names": {"api", "engine", "gateway", "rollout", "trainer", "announcer", "redis"},
    "kubernetes": set[str](),
}
"""Who may reach what: the rows of the page, written down once more and not read from the policies."""
MINUTE_S = 60
LONG = 400
"""Steps of a job that must not be over before what is tried under it. One takes one to two seconds at best."""
STEPS_AFTER = 5
"""That the job takes when everything was rolled, or was brought back."""
LOADED = "/models/calculator-tiny"
"""Where the model loader puts the demo's model."""
REACH = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(':', 1)
    try:
        socket.create_connection((host, int(port)), 2).close()
        print(address)
    except OSError:
        pass
"""
BASH = """
for one in "$@"; do timeout 2 bash -c "exec 3<>/dev/tcp/${one%:*}/${one##*:}" 2> /dev/null && echo "$one"; done
true
"""


def kubectl(*words: str, given: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["kubectl", "--namespace", "gspo", *words], input=given, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise CheckFailed(f"kubectl {' '.join(words)[:200]}: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()


def asked(*words: str) -> Any:
    return json.loads(kubectl(*words, "--output", "json"))


def workload(name: str) -> str:
    return f"{KINDS.get(name, 'deployment')}/{name}"


def pods(name: str) -> list[dict[str, Any]]:
    """Those that are not on their way out."""
    found = asked("get", "pods", "--selector", f"app.kubernetes.io/name={name}")["items"]
    return [one for one in found if "deletionTimestamp" not in one["metadata"] and one["status"].get("podIP")]


def is_there(name: str) -> bool:
    """Even if it is on its way out."""
    return bool(asked("get", "pods", "--selector", f"app.kubernetes.io/name={name}")["items"])


def rolled_out(name: str, most_s: int = 600) -> None:
    kubectl("rollout", "status", workload(name), f"--timeout={most_s}s")


def manifests() -> tuple[list[dict[str, Any]], list[str]]:
    done = subprocess.run(["kubectl", "kustomize", str(OVERLAY)], capture_output=True, text=True, check=True)
    return lowered([one for one in yaml.safe_load_all(done.stdout) if one])


def apply(objects: Sequence[dict[str, Any]]) -> None:
    kubectl("apply", "--filename", "-", given=yaml.safe_dump_all(objects))


def secret_of(folder: Path) -> dict[str, Any]:
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    name = {"namespace": "gspo", "name": f"gspo-{folder.name}"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": name, "data": data}


def install(objects: list[dict[str, Any]], secrets: Path) -> None:
    started = time.monotonic()
    apply([one for one in objects if one["kind"] == "Namespace"])
    make_secrets(secrets, "redis:6379")
    apply([secret_of(secrets / role) for role in SECRETS])
    apply([one for one in objects if one["kind"] != "NetworkPolicy"])
    for name in ORDER:
        rolled_out(name)
        say(f"{name} is ready {time.monotonic() - started:.0f} s after the first object was applied")


def targets() -> dict[str, list[str]]:
    """By name: addresses of pods, of the Service that stands for them, of names and of the cluster itself."""
    found = {name: [f"{one['status']['podIP']}:{port}" for one in pods(name)] for name, port in PORTS.items()}
    for name in ("redis", "api", "gateway"):
        found[name].append(f"{asked('get', 'service', name)['spec']['clusterIP']}:{PORTS[name]}")
    names = kubectl(
        "--namespace", "kube-system", "get", "service", "kube-dns", "--output", "jsonpath={.spec.clusterIP}"
    )
    return found | {"names": [f"{names}:53"], "kubernetes": ["10.96.0.1:443"]}


def reached(name: str, addresses: Sequence[str]) -> set[str]:
    """Of the addresses those that a pod of this name reaches."""
    pod = pods(name)[0]["metadata"]["name"]
    ask = ["bash", "-c", BASH, "-"] if name == "redis" else ["python", "-c", REACH]
    return set(kubectl("exec", pod, "--", *ask, *addresses).split())


def try_network(what: str, *, is_enforced: bool) -> None:
    """What each reaches of the others; a pod is not asked whether it reaches itself."""
    found = targets()
    for caller in ORDER:
        others = {target: some for target, some in found.items() if target != caller}
        seen = reached(caller, [one for some in others.values() for one in some])
        for target, some in others.items():
            may = caller in CALLERS[target] or not is_enforced
            for address in some:
                if (address in seen) != may:
                    word = "does not reach" if may else "reaches"
                    raise CheckFailed(f"{what}: {caller} {word} {target} {address}")
        open_to = [target for target, some in others.items() if seen & set(some)]
        say(f"{what}: {caller} reaches {', '.join(open_to) or 'nothing'}")


def kill(name: str) -> None:
    """As a node that is gone: without a last word, and something new in its place."""
    before = pods(name)[0]["metadata"]
    started = time.monotonic()
    kubectl("delete", "pod", before["name"], "--grace-period=0", "--force")
    wait(f"another pod of {name}", lambda: before["uid"] not in {one["metadata"]["uid"] for one in pods(name)}, 120)
    rolled_out(name)
    say(f"deleted the pod {before['name']}; ready again after {time.monotonic() - started:.0f} s")


def learn_under_fire(client: Client, seed: int, steps: int, gain_points: float) -> None:
    finished("model-loader")
    say(f"the model loader has fetched {kubectl('logs', 'job/model-loader')}")
    run = Run(client, seed, steps, model=LOADED)
    for number, name in enumerate(("rollout", "trainer", "redis")):
        run.reaches((number + 1) * steps // 5, 1200)
        kill(name)
    run.reaches(steps, 1800)
    result = run.result()
    before, after = result["scores"][0], result["scores"][-1]
    say(f"held-out success {before:.0%} before, {after:.0%} after {steps} steps; {result['num_groups']} groups")
    if 100 * (after - before) < gain_points:
        raise CheckFailed(f"it rose by {100 * (after - before):.0f} points; {gain_points:.0f} were expected")
    evaluate(export(client, run))


def export(client: Client, run: Run) -> str:
    """Where the newest checkpoint lies as a model, in the trainer's pod."""
    checkpoint, lies_in = exported(client, run)
    fetch(client, checkpoint, kubectl("exec", "trainer-0", "--", *sums_of(lies_in)))
    return lies_in


def evaluate(lies_in: str) -> None:
    """In the trainer's pod, as the page has it typed."""
    world = ("--env", "environments.calculator:Calculator", "--n", "20", "--out", "/tmp/evaluated")
    said_success("trainer-0", kubectl("exec", "trainer-0", "--", "gspo", "eval", lies_in, *world))


def cancel(client: Client, run: Run) -> None:
    client.cancel(run.id)
    wait("the job to be cancelled", lambda: client.job(run.id)["status"] == "cancelled", 300)


def known_step(run: Run) -> int:
    """As soon as the API says it, which is away while Redis is."""
    seen = -1

    def is_known() -> bool:
        nonlocal seen
        seen = run.step()
        return seen >= 0

    wait("the API to say a step", is_known, 300)
    return seen


def roll(client: Client, seed: int, steps: int = LONG) -> None:
    """Every workload under one job, which takes a step between two of them, and takes more when the last was rolled."""
    run = Run(client, seed, steps)
    for name in ORDER:
        run.reaches(known_step(run) + 1, 1200)
        started, before = time.monotonic(), known_step(run)
        kubectl("rollout", "restart", workload(name))
        rolled_out(name)
        say(f"rolled {name} at step {before} in {time.monotonic() - started:.0f} s")
    if (rolled := known_step(run)) == steps:
        raise CheckFailed("the job was over before all was rolled: give it more steps")
    say(f"all was rolled by step {rolled} of {steps}")
    go_on(client, run)
    again = sum(bool(int(episode["attempt"])) for episode in client.episodes(run.id))
    say(f"{again} episodes began again")


def go_on(client: Client, run: Run) -> None:
    """Some steps more; then the job is cancelled, and what it trained is counted."""
    wanted = known_step(run) + STEPS_AFTER
    run.reaches(wanted, 1800)
    cancel(client, run)
    num_steps, num_groups = settled(run)
    if num_steps < wanted:
        raise CheckFailed(f"{num_steps} steps are in the logs, and {wanted} were reported")
    say(f"cancelled after {num_steps} steps of {num_groups} groups, each trained once")


def settled(run: Run) -> tuple[int, int]:
    """How many steps and groups were trained: none is left out, and none is there twice."""
    trained = run.groups()
    groups, steps = {one["group"] for one in trained}, {one["step"] for one in trained}
    if len(groups) != len(trained) or steps != {*range(1, len(steps) + 1)}:
        raise CheckFailed(f"steps and groups: {[(one['step'], one['group']) for one in trained]}")
    return len(steps), len(groups)


def engines(client: Client) -> list[Any]:
    return [one for one in client.workers() if one["role"] == "engine" and one["alive"]]


def add_an_engine(client: Client, seed: int) -> None:
    """Nothing else is rolled, and the second engine is bound. The job outlasts both, and is cancelled then."""
    run = Run(client, seed, LONG)
    run.reaches(1, 1200)
    before = {name: {one["metadata"]["uid"] for one in pods(name)} for name in ("api", "rollout", "trainer")}
    started = time.monotonic()
    kubectl("scale", "statefulset", "engine", "--replicas=2")
    rolled_out("engine")
    say(f"a second engine is ready after {time.monotonic() - started:.0f} s")

    def bound() -> set[str]:
        """Engines that hold this job's weights: labels begin with the job."""
        return {one["id"] for one in engines(client) if str(one.get("label")).startswith(run.id)}

    wait("two engines of the job", lambda: len(bound()) == 2, 300)
    took_s = time.monotonic() - started
    say(f"the job has two engines {took_s:.0f} s after the command; it is at step {run.step()}")
    run.reaches(run.step() + 2, 1200)
    if before != {name: {one["metadata"]["uid"] for one in pods(name)} for name in before}:
        raise CheckFailed("something else was rolled")
    export(client, run)
    if run.step() == LONG:
        raise CheckFailed("the job was over: give it more steps")
    cancel(client, run)
    kubectl("scale", "statefulset", "engine", "--replicas=1")
    wait("one engine", lambda: len(engines(client)) == 1, 300)
    say(f"one engine again: {engines(client)[0]['id']}")


def begin(cron_job: str, job: str) -> None:
    """As `kubectl create job --from` does, which no longer knows the CronJobs that an old cluster serves."""
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job, "namespace": "gspo"}}
    apply([made | {"spec": asked("get", "cronjob", cron_job)["spec"]["jobTemplate"]["spec"]}])


def finished(job: str, most_s: int = 900) -> None:
    kubectl("wait", "--for=condition=complete", f"job/{job}", f"--timeout={most_s}s")


def coming_minute(now: float) -> int:
    """Of the hour; one that begins in half a minute at the earliest, so that it is not over when it is written."""
    return time.localtime(now + MINUTE_S * 1.5).tm_min


def jobs_of(cron_job: str) -> set[str]:
    """Names of the jobs that its schedule began."""
    found = [one["metadata"] for one in asked("get", "jobs")["items"]]
    owner = ("CronJob", cron_job)
    return {
        one["name"] for one in found if owner in {(by["kind"], by["name"]) for by in one.get("ownerReferences", ())}
    }


def scheduled(cron_job: str, most_s: float = 240) -> str:
    """The job that the CronJob itself begins, given a schedule that comes soon; its own schedule is put back.

    Once an hour and not every minute: the last such minute is longer ago than what a controller makes up for.
    """

    def schedule(when: str) -> None:
        kubectl("patch", "cronjob", cron_job, "--type=merge", "--patch", json.dumps({"spec": {"schedule": when}}))

    own, before = asked("get", "cronjob", cron_job)["spec"]["schedule"], jobs_of(cron_job)
    schedule(soon := f"{coming_minute(time.time())} * * * *")
    try:
        wait(f"a job of {cron_job} at {soon}", lambda: bool(jobs_of(cron_job) - before), most_s)
        (job,) = jobs_of(cron_job) - before
    finally:
        schedule(own)
    return job


def restore(client: Client, objects: list[dict[str, Any]], seed: int, steps: int = LONG) -> None:
    """A backup by its schedule under a running job; the claims of data and Redis are emptied, and the job goes on."""
    run = Run(client, seed, steps)
    run.reaches(2, 1200)
    started = time.monotonic()
    job = scheduled("backup")
    began, at_least = time.monotonic(), known_step(run) - 1
    say(f"the schedule began {job} {began - started:.0f} s after it was set, at step {at_least + 1}")
    finished(job)
    saved = kubectl("logs", f"job/{job}", "--container", "save")
    say(f"saved in {time.monotonic() - began:.0f} s at step {run.step()}: {saved}")
    if run.step() == steps:
        raise CheckFailed("the job was over when it was saved: give it more steps")
    for some in LEAVING:
        kubectl("scale", *map(workload, some), "--replicas=0")
        wait("pods to go", lambda some=some: not any(is_there(name) for name in some), 900)
    say(f"nothing runs {time.monotonic() - started:.0f} s after the backup began")
    empty()
    bring_back(objects)
    if (back_at := known_step(run)) < at_least:
        raise CheckFailed(f"the job is back at step {back_at}, and was beyond {at_least} when it was saved")
    say(f"the job is at step {back_at}")
    go_on(client, run)


def bring_back(objects: list[dict[str, Any]]) -> None:
    """Claims again, the snapshot, then everything."""
    started = time.monotonic()
    apply([one for one in objects if one["kind"] == "PersistentVolumeClaim"])
    begin("restore", "restore-now")
    finished("restore-now")
    say(f"restored in {time.monotonic() - started:.0f} s: {kubectl('logs', 'job/restore-now')}")
    kubectl("scale", *map(workload, ORDER), "--replicas=1")
    for name in ORDER:
        rolled_out(name)
    say(f"all is ready {time.monotonic() - started:.0f} s after the restore began")


def empty() -> None:
    """Claims and volumes of data and Redis are removed with what they hold, and volumes are made again, empty."""
    kubectl("delete", "job", "--all")  # a pod that has ended holds its claims, too
    kubectl("delete", "pvc", "data", "data-redis-0", "--wait=false")
    new_volumes()


def new_volumes() -> None:
    """Empty ones in the place of those whose claims were deleted."""
    wait("claims to go", lambda: {"data", "data-redis-0"}.isdisjoint(_claims()), 300)
    volumes = [one for one in asked("get", "pv")["items"] if one["metadata"]["name"] in ("data", "redis")]
    kubectl("delete", "pv", "data", "redis")
    for one in volumes:
        folder = Path(one["spec"]["hostPath"]["path"])
        subprocess.run(["rm", "-rf", folder], check=True)
        folder.mkdir()
        subprocess.run(["chown", "10001:10001", folder], check=True)
        one["metadata"] = {"name": one["metadata"]["name"]}
        one["spec"]["claimRef"] = {key: one["spec"]["claimRef"][key] for key in ("namespace", "name")}
        one.pop("status")
    apply(volumes)


def _claims() -> set[str]:
    return {one["metadata"]["name"] for one in asked("get", "pvc")["items"]}


PARTS = ("install", "policies", "learn", "restore", "engines", "roll")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.k8s_check")
    parser.add_argument("--secrets", type=Path, required=True, help="a folder for the installation's secrets")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--gain", type=float, default=15.0, help="points of held-out success (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args(arguments)
    at = k8s_report.commit(HERE)
    objects, told = manifests()
    print("changed for this cluster, and for the test alone:", *told, sep="\n  ", flush=True)
    try:
        if "install" in given.only:
            install(objects, given.secrets)
            try_network("without policies", is_enforced=False)
        if "policies" in given.only:
            apply([one for one in objects if one["kind"] == "NetworkPolicy"])
            wait("the first rule", lambda: not reached("environments", ["10.96.0.1:443"]), 60)
            try_network("with policies", is_enforced=True)
        address = asked("get", "service", "api")["spec"]["clusterIP"]
        with Client(f"http://{address}:8000", (given.secrets / "api" / "gspo_api_keys").read_text()) as client:
            if "learn" in given.only:
                learn_under_fire(client, 0, given.steps, given.gain)
            if "restore" in given.only:
                restore(client, objects, 3)
            if "engines" in given.only:
                add_an_engine(client, 1)
            if "roll" in given.only:
                roll(client, 2)
    except CheckFailed as error:
        print(f"k8s_check: {error}", file=sys.stderr)
        print(kubectl("get", "pods", "--output=wide", check=False), file=sys.stderr)
        return 1
    say("all of it holds")
    if set(given.only) == set(PARTS):
        # Of tests/e2e/with_cluster.sh, whose folder holds that of the secrets.
        stages = (given.secrets.parents[1] / "stages").read_text()
        k8s_report.put_into(REPORT, k8s_report.section(SAID, stages, at, told))
        say(f"written into {REPORT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
