"""Compose, the Dockerfile, the manifests and the processes themselves agree with the topology that launchers read."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_core import __version__
from gspo_core.cli import main
from services.files.data_dir import DataDir
from services.hosts.local import WallPolicy
from services.hosts.sandboxes.offers import offers
from services.launch import launchers
from services.launch.crew import SLACK_S
from services.launch.first_secrets import make_secrets
from services.launch.installation import Installation
from services.launch.placement import PlacementRequest, place
from services.launch.topology import (
    ALIKE,
    API,
    ENGINE,
    ENVIRONMENTS,
    GATEWAY,
    PROCESSES,
    REDIS,
    ROLLOUT,
    SECRETS,
    SGLANG,
    TRAINER,
    Copies,
    DataAccess,
    FileHealth,
    HttpHealth,
    PingHealth,
    Process,
    Share,
    Site,
    processes,
)  # fmt: skip
from services.process import lifecycle
from services.process.settings import PREFIX, Settings
from services.state import child
from tests.repo.manifest_policy import workloads

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (ROOT / "services" / "Dockerfile").read_text().replace("\\\n", " ")
RESIDENT = [one for one in PROCESSES if one.health is not None]
OURS = [one for one in RESIDENT if one.module is not None]
ANYTHING = "(anything)"
PROBE = "/app/services/process/probe.sh"


def names(values: Sequence[Process]) -> list[str]:
    return [one.name for one in values]


@dataclass(frozen=True)
class Stage:
    """A target of the Dockerfile, with what it has of ``base``."""

    entrypoint: list[str]
    environment: dict[str, str]
    healthcheck: list[str]
    ports: set[int]


def stage(name: str) -> Stage:
    text = "".join(
        re.findall(rf"^FROM \S+ AS (?:base|{name})\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    )
    variables = " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE))
    return Stage(
        json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]),
        dict(word.split("=", 1) for word in shlex.split(variables)),
        json.loads(re.findall(r"^HEALTHCHECK .*? CMD (.*)$", text, re.MULTILINE)[0]),
        {int(port) for port in re.findall(r"^EXPOSE (\d+)", text, re.MULTILINE)},
    )


def manifests() -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Name of the process, what its pods are in, their template: of the base, both engines, the trainer of a gang."""
    folder = ROOT / "k8s"
    paths = [*sorted((folder / "base").glob("*.yaml")), folder / "components" / "engine-embedded" / "engine.yaml"]
    paths += [
        folder / "components" / "engine-sglang" / "engine.yaml",
        folder / "overlays" / "multi-node" / "trainer.yaml",
    ]
    for path in paths:
        for name, owner, template in workloads(
            [one for one in yaml.safe_load_all(path.read_text()) if "metadata" in (one or {})]
        ):
            yield "sglang" if "sglang" in path.parent.name else name, owner, template


MANIFESTS = list(manifests())


def kind(name: str) -> Process:
    """Of a service of compose or a pod."""
    return next(one for one in (*PROCESSES, SGLANG) if one.name == name.removesuffix("-gpu"))


def options(words: Sequence[str]) -> dict[str, str]:
    """What an argument parser would read: ``--name value`` and ``--name=value``."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name and not found[name]:
            found[name] = word
    return found


def assert_starts(one: Process, words: Sequence[str], where: str) -> None:
    values = {"model": ANYTHING, "threads": ANYTHING, "secrets_dir": ANYTHING, "host": "0.0.0.0", "port": str(one.port)}
    wanted = one.command("python", Site.CONTAINERS, values)
    if one.module is not None:
        assert re.search(rf"(-m|--module) {re.escape(one.module)}( |$)", " ".join(words)), where
    given = options(words)
    for option, value in options(wanted).items():
        assert option in given, f"{where} starts {one.name} without {option}"
        assert value in (given[option], ANYTHING), f"{where} gives {option} {given[option]}, not {value}"
    unknown = given.keys() - options(wanted).keys()
    if one in OURS and "torchrun" not in words:
        assert unknown == set(), f"{where} gives options that the topology does not know: {unknown}"


def test_what_a_process_waits_for_and_calls_starts_before_it() -> None:
    assert len(set(names(PROCESSES))) == len(PROCESSES)
    for position, one in enumerate(PROCESSES):
        assert {*one.after, *one.calls} <= {*names(PROCESSES[:position])}, one.name
        assert one.requires <= one.reads <= Settings.model_fields.keys(), one.name
    assert names(processes(Site.LAPTOP)) == ["redis", "engine", "api", "trainer", "rollout", "gateway"]
    assert names(processes(Site.LAPTOP, has_engines=True)) == ["redis", "api", "trainer", "rollout", "gateway"]


@pytest.mark.parametrize("name", [*names(PROCESSES), "trainer-gpu", "sglang"])
def test_compose_starts_what_the_topology_says(name: str) -> None:
    service = SERVICES[name]
    given = service.get("command", ())  # one string is split by compose
    command = [word for part in ([given] if isinstance(given, str) else given) for word in shlex.split(part)]
    entrypoint = service.get("entrypoint") or (
        stage(service["build"]["target"]).entrypoint if "build" in service else []
    )
    assert_starts(kind(name), [*entrypoint, *command], "compose")


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_manifests_start_what_the_topology_says(number: int) -> None:
    name, owner, template = MANIFESTS[number]
    (container,) = template["spec"]["containers"]
    one = kind(name)
    entrypoint = container.get("command") or stage(container["image"].removeprefix("gspo-")).entrypoint
    arguments = [word for part in container.get("args", ()) for word in shlex.split(part)]
    assert_starts(one, [*entrypoint, *arguments], f"k8s ({owner['kind']})")
    if one.copies is Copies.ONE:
        assert owner["spec"]["replicas"] == 1


def test_compose_starts_them_in_the_order_of_the_topology() -> None:
    for name in (*names(PROCESSES), "trainer-gpu"):
        needs = {other: need["condition"] for other, need in SERVICES[name].get("depends_on", {}).items()}
        needs.pop("model", None)  # compose alone starts with one that is made
        wanted = {
            other: "service_healthy" if kind(other).health else "service_completed_successfully"
            for other in kind(name).after
        }
        assert needs == wanted, name
    assert SERVICES["secrets"]["restart"] == "no"


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_who_is_asked_to_leave_is_not_killed_before_it_has_left() -> None:
    for name in (*names(RESIDENT), "trainer-gpu", "sglang"):
        most_s = kind(name).leaving.most_s(Site.CONTAINERS)
        assert seconds(SERVICES[name]["stop_grace_period"]) >= most_s, f"compose kills {name}"
    for name, owner, template in MANIFESTS:
        pod = template["spec"]
        (container,) = pod["containers"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        most_s = float(before[1]) + kind(name).leaving.most_s(Site.CONTAINERS)
        assert pod["terminationGracePeriodSeconds"] >= most_s, f"the {owner['kind']} {name} is killed after less"


def variables(values: Mapping[str, object]) -> set[str]:
    """Fields of Settings among environment variables."""
    return {name.removeprefix(PREFIX).lower() for name in values if name.startswith(PREFIX)}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """For each process the settings that its directory of secrets holds."""
    root = tmp_path_factory.mktemp("secrets")
    make_secrets(root, "redis:6379")
    return {
        folder.name: variables(dict.fromkeys(file.name.upper() for file in folder.iterdir()))
        for folder in root.iterdir()
    }


def test_every_process_has_the_secrets_that_the_topology_says(secrets: Mapping[str, set[str]]) -> None:
    assert {one.name for one in PROCESSES if one.has_secrets} == secrets.keys() - {"redis"}
    for one in OURS:
        assert secrets.get(one.name, set()) <= one.reads
        mounted = [volume for volume in SERVICES[one.name].get("volumes", ()) if volume.startswith("secrets-")]
        assert mounted == ([f"secrets-{one.name}:/secrets:ro"] if one.has_secrets else []), one.name


@pytest.mark.parametrize("name", [*names(OURS), "trainer-gpu"])
def test_compose_gives_every_process_the_settings_that_it_requires(name: str, secrets: Mapping[str, set[str]]) -> None:
    one, service = kind(name), SERVICES[name]
    environment = service.get("environment", {})
    in_image = variables(stage(service["build"]["target"]).environment)
    given = variables(environment) | in_image | secrets.get(one.name, set())
    assert one.requires <= given
    assert variables(environment) <= one.reads, "it is given settings that it does not read"
    assert "log_level" in variables(environment), "GSPO_LOG_LEVEL does not reach it"
    assert ("secrets_dir" in given) is one.has_secrets
    # What is set for compose and not handed on would be ignored without a word. Each gateway has an address of its own.
    assert one.reads - given <= {"gateway_own_url"}


def configured(container: Mapping[str, Any]) -> dict[str, str | None]:
    """None: it has what an overlay may set."""
    (settings,) = yaml.safe_load((ROOT / "k8s" / "base" / "kustomization.yaml").read_text())["configMapGenerator"]
    shared = dict(literal.split("=", 1) for literal in settings["literals"])
    given: dict[str, str | None] = {**shared} if "envFrom" in container else {}
    for one in container.get("env", ()):
        reference = one.get("valueFrom", {}).get("configMapKeyRef")
        given[one["name"]] = shared.get(reference["key"]) if reference else str(one.get("value"))
    return given


@pytest.mark.parametrize("name", names(OURS))
def test_manifests_give_every_process_the_settings_that_it_requires(name: str, secrets: Mapping[str, set[str]]) -> None:
    for template in [template for other, _, template in MANIFESTS if other == name]:
        (container,) = template["spec"]["containers"]
        given = variables(configured(container)) | variables(stage(name).environment) | secrets.get(name, set())
        assert kind(name).requires <= given
        assert "log_level" in given, "the level of the installation does not reach it"


@pytest.mark.parametrize("name", names(OURS))
def test_what_is_set_for_a_cluster_reaches_whoever_reads_it(name: str, secrets: Mapping[str, set[str]]) -> None:
    for container in [template["spec"]["containers"][0] for other, _, template in MANIFESTS if other == name]:
        fixed = variables(configured(container)) | variables(stage(name).environment) | secrets.get(name, set())
        # A key is a file in the pod's secret, where there is one.
        assert "envFrom" in container or kind(name).reads - {"sandbox_key"} <= fixed


def test_what_must_be_alike_everywhere_is() -> None:
    for setting in ALIKE:
        variable = PREFIX + setting.upper()
        readers = [one.name for one in OURS if setting in one.reads]
        assert len(readers) >= 2
        given = {SERVICES[name].get("environment", {}).get(variable) for name in readers}
        assert len(given) == 1, f"{variable} differs in compose"
        pods = [template["spec"]["containers"][0] for name, _, template in MANIFESTS if name in readers]
        given = {configured(container).get(variable) for container in pods}
        assert len(given) == 1, f"{variable} differs in k8s"
    addresses = {SERVICES[name]["environment"]["GSPO_ENV_HOSTS"] for name in ("rollout", "gateway")}
    addresses |= {
        configured(template["spec"]["containers"][0])["GSPO_ENV_HOSTS"]
        for name, _, template in MANIFESTS
        if name in ("rollout", "gateway")
    }
    assert addresses == {f"{ENVIRONMENTS.name}:{ENVIRONMENTS.port}"}


def test_the_images_and_compose_look_at_the_health_of_the_topology() -> None:
    for one in OURS:
        asked = " ".join(stage(one.name).healthcheck)
        match one.health:
            case HttpHealth(live=path):
                assert asked == f"bash {PROBE} http {one.port} {path}", one.name
                assert stage(one.name).ports == {one.port}
            case FileHealth():
                file = stage(one.name).environment["GSPO_HEALTH_FILE"]
                assert asked.removesuffix(" --ready") == f"bash {PROBE} file {file}", one.name
    assert isinstance(REDIS.health, PingHealth)
    assert " ping " in str(SERVICES["redis"]["healthcheck"]["test"])
    assert isinstance(SGLANG.health, HttpHealth)
    assert SERVICES["sglang"]["healthcheck"]["test"][2:] == ["/probe.sh", "http", str(SGLANG.port), SGLANG.health.live]
    assert f"./{PROBE.removeprefix('/app/')}:/probe.sh:ro" in SERVICES["sglang"]["volumes"]


def test_compose_has_sglang_read_the_file_of_its_keys() -> None:
    """It ignores ``--config=FILE``: the option has to be a word of its own."""
    words = shlex.split(SERVICES["sglang"]["command"])
    assert ("--config", "/secrets/sglang.yaml") in pairwise(words)


def devices(service: str, given: Mapping[str, str]) -> set[str]:
    """The GPUs that a service of compose may use, with these variables set."""
    value = SERVICES[service]["environment"]["CUDA_VISIBLE_DEVICES"]
    name, default = re.fullmatch(r"\$\{(\w+):-(.*)\}", value).groups()  # type: ignore[union-attr]
    return set(given.get(name, default).split(","))


@pytest.mark.parametrize("env_file", [None, "gpu.env"])
def test_no_gpu_is_given_to_the_engine_and_the_trainer(env_file: str | None) -> None:
    """`count: N` would give both the first N: both see all, and are told which are theirs."""
    lines = (ROOT / "deploy" / env_file).read_text().splitlines() if env_file else []
    given = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    with_devices = [name for name, service in SERVICES.items() if "devices" in str(service.get("deploy"))]
    assert with_devices == ["sglang", "trainer-gpu"]
    assert not devices("sglang", given) & devices("trainer-gpu", given)
    for name in with_devices:
        (reserved,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["count"] == "all"
    assert "--nproc-per-node=gpu" in SERVICES["trainer-gpu"]["command"], "a process for each GPU"


def test_ranks_of_one_container_have_shared_memory_to_meet_in() -> None:
    for name in ("sglang", "trainer-gpu"):
        assert SERVICES[name]["shm_size"] == "16g", "Docker gives 64 MB, and NCCL ends where they are full"
    several = [pod["spec"] for name, owner, pod in MANIFESTS if name == "sglang" or owner["kind"] == "JobSet"]
    assert len(several) == 2
    for pod in several:
        assert "/dev/shm" in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}


def test_no_image_trains_while_it_is_built() -> None:
    assert not re.search(r"^RUN .*examples\.demo", DOCKERFILE, re.MULTILINE)
    (model,) = [one for one in SERVICES.values() if "examples.demo.model" in str(one.get("entrypoint"))]
    assert model["volumes"] == ["demo:/app/models"]
    assert SERVICES["engine"]["depends_on"]["model"] == {"condition": "service_completed_successfully"}


def test_images_have_the_command_that_wheels_bring(tmp_path: Path) -> None:
    """Nothing of ours is installed in them: the example for KubeRay begins with it."""
    script = tmp_path / "gspo"
    (writes,) = re.findall(r"^RUN (printf .* > /usr/local/bin/gspo .*)$", DOCKERFILE, re.MULTILINE)
    subprocess.run(["bash", "-c", writes.replace("/usr/local/bin/gspo", str(script))], check=True)
    asked = subprocess.run(
        [script, "--version"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.split()[-1] == __version__


def test_the_image_of_the_example_for_kuberay_is_made_of_ours() -> None:
    folder = ROOT / "examples" / "kuberay"
    dockerfile, (job,) = (folder / "Dockerfile").read_text(), yaml.safe_load_all((folder / "rayjob.yaml").read_text())
    cluster, pinned = job["spec"]["rayClusterSpec"], (ROOT / "constraints.txt").read_text()
    assert SERVICES["trainer-gpu"]["image"] == f"gspo-trainer-cuda:${{GSPO_VERSION:-{__version__}}}"
    assert f"FROM gspo-trainer-cuda:{__version__}\n" in dockerfile
    (image,) = {
        container["image"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    }
    assert image == f"gspo-trainer-cuda-ray:{__version__}"
    assert f"docker build --tag {image} examples/kuberay" in dockerfile
    (ray,) = re.findall(r"ray\[default\]==([\d.]+)", dockerfile)
    assert f"\nray=={ray}\n" in pinned
    assert ray == cluster["rayVersion"]
    (sglang,) = re.findall(r"sglang==([\d.]+)", dockerfile)
    assert SERVICES["sglang"]["image"].endswith(f":v{sglang}}}")
    (python,) = re.findall(r"--sglang-python (\S+)", job["spec"]["entrypoint"])
    assert f"python -m venv {python.removesuffix('/bin/python')}" in dockerfile


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_the_manifests_look_at_the_health_of_the_topology(number: int) -> None:
    name, _, template = MANIFESTS[number]
    (container,) = template["spec"]["containers"]
    one, ports = kind(name), {port["containerPort"] for port in container.get("ports", ())}
    ready, live = (json.dumps(container[probe]) for probe in ("readinessProbe", "livenessProbe"))
    match one.health:
        case HttpHealth():
            assert f'"path": "{one.health.ready}"' in ready
            assert f'"path": "{one.health.live}"' in live or '"tcpSocket"' in live
            assert ports == {one.port}
        case FileHealth():
            probe = '"bash", "/app/services/process/probe.sh", "file", "/tmp/health"'
            assert f'{probe}, "--ready"]' in ready
            assert f"{probe}]" in live
            assert ("GSPO_HEALTH_FILE", "/tmp/health") in configured(container).items()
        case PingHealth():
            assert all(" ping " in probe for probe in (ready, live))


def compose_access(service: Mapping[str, Any], volume: str, target: str) -> DataAccess:
    mounts = [str(one) for one in service.get("volumes", ()) if f":{target}" in str(one) and volume in str(one)]
    return DataAccess.NONE if not mounts else DataAccess.READ if mounts[0].endswith(":ro") else DataAccess.WRITE


def pod_access(container: Mapping[str, Any], volume: str) -> DataAccess:
    mounts = [one for one in container.get("volumeMounts", ()) if one["name"] == volume]
    return DataAccess.NONE if not mounts else DataAccess.READ if mounts[0].get("readOnly") else DataAccess.WRITE


def test_data_models_and_devices_are_for_those_that_the_topology_says() -> None:
    for name in (*names(OURS), "trainer-gpu", "sglang"):
        one, service = kind(name), SERVICES[name]
        assert compose_access(service, "data", "/data") is one.data, name
        assert compose_access(service, "models", "/models") is (
            DataAccess.READ if one.reads_models else DataAccess.NONE
        ), name
        if "devices" in str(service.get("deploy")):
            assert one.on_device, name
    for name, _, template in MANIFESTS:
        one, (container,) = kind(name), template["spec"]["containers"]
        if one is REDIS:
            continue
        assert pod_access(container, "data") is one.data, name
        assert pod_access(container, "models") is (DataAccess.READ if one.reads_models else DataAccess.NONE), name
        assert one.on_device or "nvidia.com/gpu" not in str(container["resources"]), name


def test_whom_a_process_calls_it_reaches_in_compose() -> None:
    def networks(name: str) -> set[str]:
        return set(SERVICES[name].get("networks", ()))

    for one in PROCESSES:
        for called in one.calls:
            assert networks(one.name) & networks(called), f"{one.name} does not reach {called}"


@pytest.mark.parametrize("name", names(OURS))
def test_a_process_reads_the_settings_that_the_topology_says(name: str) -> None:
    module = kind(name).module or ""
    path = ROOT / module.replace(".", "/")
    files = [one for one in path.rglob("*.py") if one.name == "__main__.py" or "__main__" not in one.read_text()]
    texts = [one.read_text() for one in files or [path.with_suffix(".py")]]
    # What is made of the settings as a whole reads them in its own place.
    texts += [
        inspect.getsource(one) for text in texts if "WallPolicy.of(settings)" in text for one in (WallPolicy, offers)
    ]
    found = {word for text in texts for word in re.findall(r"\bsettings\.(\w+)", text)}
    assert found & Settings.model_fields.keys() == kind(name).reads - {"secrets_dir"}


def test_processes_leave_within_the_time_that_the_topology_says() -> None:
    defaults = lifecycle.run_until_signalled.__kwdefaults__ or {}
    cleaning_s = lifecycle.CLEANING_UP_S
    api, rollout = import_module("services.api.__main__"), import_module("services.rollout.__main__")
    assert (API.leaving.default_drain_s, API.leaving.cleanup_s) == (api.GRACE_S, api.LEAVING_S + cleaning_s)
    gateway = import_module("services.gateway.__main__")
    assert ROLLOUT.leaving.cleanup_s == rollout.LEAVING_S + cleaning_s
    assert GATEWAY.leaving.cleanup_s == gateway.LEAVING_S + cleaning_s
    for one in (ENGINE, ENVIRONMENTS):
        assert (one.leaving.default_drain_s, one.leaving.cleanup_s) == (defaults["grace_s"], cleaning_s)
    assert TRAINER.leaving.cleanup_s == cleaning_s
    for one in (GATEWAY, ROLLOUT, TRAINER):
        source = (ROOT / "services" / one.name / "__main__.py").read_text()
        default = re.search(rf'"{one.leaving.option}", type=float, default=([\d.]+)', source)
        assert default is not None
        assert float(default[1]) == one.leaving.default_drain_s
    assert REDIS.leaving.most_s(Site.LAPTOP) == child.STOP_TIMEOUT_S


def test_every_redis_that_is_started_keeps_what_the_topology_says(tmp_path: Path) -> None:
    given = child._configuration(tmp_path, tmp_path / "socket")
    assert options(REDIS.arguments).items() <= options(given).items()


def installation(tmp_path: Path) -> Installation:
    """On three nodes, as the launchers for batch systems and clusters start it."""
    wanted = PlacementRequest(nodes=3, trainer_nodes=2, engines=2)
    nodes = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    return Installation(place(wanted, Site.BATCH), nodes, DataDir(tmp_path), "m", "python", "/redis-server")


def test_what_launchers_start_elsewhere_is_what_the_topology_says(tmp_path: Path) -> None:
    whole = installation(tmp_path)
    kinds = list(dict.fromkeys(member.process.name for member in whole.members))
    assert kinds == [one.name for one in processes(Site.BATCH) if one.health]
    for member in whole.members:
        command, given = whole.command(member), whole.environment(member)
        leaving = member.process.leaving.arguments(Site.BATCH)
        assert tuple(command[-len(leaving) :] if leaving else ()) == leaving
        if member.process.module is None:
            assert options(REDIS.arguments).items() <= options(command).items()
        else:
            assert f"{'--module' if member.process is TRAINER else '-m'} {member.process.module}" in " ".join(command)
            assert options(member.process.arguments).keys() <= options(command).keys()
        assert variables(given) <= member.process.reads
        assert (PREFIX + "SECRETS_DIR" in given) is member.process.has_secrets


def test_members_of_one_kind_have_an_address_each(tmp_path: Path) -> None:
    whole = installation(tmp_path)
    urls = [whole.engine_url(one) for one in whole.engines()]
    assert urls == ["http://10.0.0.1:30000", "http://10.0.0.2:30001"]
    for member in whole.members:
        if "engine_urls" in member.process.reads:
            assert whole.environment(member)["GSPO_ENGINE_URLS"] == ",".join(urls)


@pytest.mark.parametrize(("reserved_mb", "bound"), [(None, "1024mb"), (9000, "4500mb")])
def test_a_redis_elsewhere_refuses_writes_before_it_has_used_up_what_is_reserved(
    reserved_mb: int | None, bound: str, tmp_path: Path
) -> None:
    """Half: while it rewrites its file, there may be two of it."""
    shares = {"redis": Share(memory_mb=reserved_mb)} if reserved_mb else {}
    members = place(PlacementRequest(shares=shares), Site.BATCH)
    whole = Installation(members, ("10.0.0.1",), DataDir(tmp_path), "m", "python", "/redis-server")
    (redis,) = [one for one in members if one.process is REDIS]
    assert options(whole.command(redis))["--maxmemory"] == bound


def test_a_batch_script_is_told_to_leave_early_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "--data-dir", str(tmp_path), "--model", "m"]) == 0
    signal_s = re.search(r"--signal=B:TERM@(\d+)", capsys.readouterr().out)
    assert signal_s is not None
    resident = [one for one in processes(Site.BATCH) if one.health]
    assert int(signal_s[1]) > sum(one.leaving.most_s(Site.BATCH) + SLACK_S for one in resident)


def test_every_module_in_launchers_is_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher is one file: nothing else has to name it."""
    (tmp_path / "somewhere.py").write_text(
        "from services.launch.topology import Site, processes\n"
        "HELP = 'print what would be started'\n"
        "def add_options(parser): parser.add_argument('--python', default='python')\n"
        "def run(arguments):\n"
        "    for one in processes(Site.LAPTOP, has_engines=True):\n"
        "        print(one.name, *one.command(arguments.python, Site.LAPTOP))\n"
        "    return 0\n"
    )
    monkeypatch.setattr(launchers, "__path__", [*launchers.__path__, str(tmp_path)])
    assert main(["launch", "somewhere", "--python", "py"]) == 0
    assert "trainer py -m services.trainer\n" in capsys.readouterr().out
    assert {"slurm", "somewhere"} <= launchers.found().keys()


def test_the_secrets_come_first() -> None:
    assert PROCESSES[0] is SECRETS
