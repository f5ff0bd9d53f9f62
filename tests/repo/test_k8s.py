"""The manifests: every overlay renders, fits the schemas of two versions, and keeps what the project demands."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.manifest_policy import containers, problems, workloads

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
VERSIONS = ("1.31", "1.37")
# Kinds of others, of which no schema is to be had: the fields that we use, with their types.
SCHEMAS = json.loads((Path(__file__).with_name("k8s_schemas.json")).read_text())

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlays and is not here")


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


@cache
def render(overlay: str) -> list[dict[str, Any]]:
    return rendered(ROOT / "k8s" / "overlays" / overlay)


def rendered(directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, _Strict) if one]


def metrics() -> set[str]:
    text = "".join(path.read_text() for path in (ROOT / "services" / "api").rglob("*.py"))
    return set(re.findall(r'"(gspo_\w+)"', text))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_what_is_demanded(overlay: str) -> None:
    assert problems(render(overlay), metrics()) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_fits_the_schemas(overlay: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-k8s`, which installs it")
    for one in render(overlay):
        if one["kind"] in SCHEMAS:
            assert one["apiVersion"] == SCHEMAS[one["kind"]]["apiVersion"]
            assert misfits(one["spec"], SCHEMAS[one["kind"]]["spec"], one["kind"]) == []
        else:  # a kind without a schema raises
            validate.validate(one, version, strict=True)


def misfits(value: Any, schema: Any, at: str) -> list[str]:
    """``schema``: a type name, a list of one schema, or an object; "*" takes anything, a name with ! must be there."""
    if schema == "*":
        return []
    if isinstance(schema, str):
        types: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "boolean": (bool,)}
        return [] if type(value) in types[schema] else [f"{at} is not of type {schema}"]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [bad for number, one in enumerate(value) for bad in misfits(one, schema[0], f"{at}[{number}]")]
    if not isinstance(value, dict):
        return [f"{at} is no object"]
    known = {name.rstrip("!"): inner for name, inner in schema.items()}
    missing = [f"{at}.{name[:-1]} is missing" for name in schema if name.endswith("!") and name[:-1] not in value]
    unknown = [f"{at}.{name} is unknown" for name in value if name not in known]
    fields = value.keys() & known.keys()
    return missing + unknown + [bad for name in fields for bad in misfits(value[name], known[name], f"{at}.{name}")]


def of(objects: list[Any], kind: str, name: str) -> Any:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(objects: list[Any], name: str) -> Any:
    return next(template["spec"] for named, _, template in workloads(objects) if named == name)


def first(objects: list[Any], name: str) -> Any:
    return pod(objects, name)["containers"][0]


def _port(objects: list[Any]) -> None:
    of(objects, "Service", "api")["spec"]["ports"][0]["targetPort"] = "web"


def _probe(objects: list[Any]) -> None:
    first(objects, "api")["readinessProbe"]["httpGet"]["port"] = "web"


def _live(objects: list[Any]) -> None:
    first(objects, "api")["livenessProbe"]["httpGet"]["path"] = "/readyz"


def _redis_in(objects: list[Any]) -> None:
    peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "environments"}}}
    of(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"].append(peer)


def _wall(objects: list[Any]) -> None:
    of(objects, "NetworkPolicy", "environments")["spec"]["egress"] = [{"to": [{"podSelector": {}}]}]


def _metric(objects: list[Any]) -> None:
    scaler = of(objects, "HorizontalPodAutoscaler", "rollout")
    scaler["spec"]["metrics"][0]["external"]["metric"]["name"] = "gspo_no_such_metric"


def _backoff(objects: list[Any]) -> None:
    (job,) = of(objects, "JobSet", "trainer")["spec"]["replicatedJobs"]
    job["template"]["spec"]["backoffLimit"] = 3


def _subdomain(objects: list[Any]) -> None:
    of(objects, "JobSet", "trainer")["spec"]["network"]["subdomain"] = "elsewhere"


def _node_rank(objects: list[Any]) -> None:
    environment = first(objects, "trainer")["env"]
    environment[:] = [one for one in environment if one["name"] != "PET_NODE_RANK"]


def _one_pod_anew(objects: list[Any]) -> None:
    (job,) = of(objects, "JobSet", "trainer")["spec"]["replicatedJobs"]
    job["template"]["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Ignore"


def _restart(objects: list[Any]) -> None:
    of(objects, "LeaderWorkerSet", "engine")["spec"]["leaderWorkerTemplate"].pop("restartPolicy")


def _env(objects: list[Any]) -> None:
    first(objects, "rollout")["env"].append({"name": "GSPO_NO_SUCH_SETTING", "value": "1"})


MUTATIONS: dict[str, Callable[[list[Any]], object]] = {
    "root": lambda all: pod(all, "api")["securityContext"].pop("runAsNonRoot"),
    "privileges": lambda all: first(all, "rollout")["securityContext"].pop("allowPrivilegeEscalation"),
    "writable root": lambda all: first(all, "trainer")["securityContext"].update(readOnlyRootFilesystem=False),
    "capabilities": lambda all: first(all, "engine")["securityContext"].update(capabilities={"add": ["NET_RAW"]}),
    "token": lambda all: pod(all, "environments").pop("automountServiceAccountToken"),
    "latest": lambda all: first(all, "api").update(image="gspo-api:latest"),
    "no tag": lambda all: first(all, "api").update(image="registry:5000/gspo-api"),
    "port of a service": _port,
    "port of a probe": _probe,
    "no probe": lambda all: first(all, "redis").pop("livenessProbe"),
    "liveness on others": _live,
    "quantity": lambda all: first(all, "api")["resources"]["limits"].update(memory="12Quux"),
    "cpu limit": lambda all: first(all, "api")["resources"]["limits"].update(cpu="1"),
    "selector": lambda all: of(all, "Deployment", "api")["spec"]["selector"]["matchLabels"].update(a="b"),
    "empty service": lambda all: of(all, "Service", "redis")["spec"]["selector"].update(a="b"),
    "names": lambda all: all.remove(of(all, "NetworkPolicy", "dns")),
    "default deny": lambda all: all.remove(of(all, "NetworkPolicy", "default-deny")),
    "redis open": _redis_in,
    "wall": _wall,
    "unknown setting": _env,
    "eviction": lambda all: first(all, "redis")["args"].remove("--maxmemory-policy noeviction"),
    "grace": lambda all: pod(all, "rollout").update(terminationGracePeriodSeconds=325),
    "budget": lambda all: all.remove(of(all, "PodDisruptionBudget", "rollout")),
    "secret": lambda all: all.append(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "gspo"}}
    ),
    "metric": _metric,
    "host path": lambda all: pod(all, "trainer")["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
    "slow start": lambda all: first(all, "trainer")["startupProbe"].update(failureThreshold=3),
    "unknown claim": lambda all: all.remove(of(all, "PersistentVolumeClaim", "models")),
    "namespace": lambda all: of(all, "Namespace", "gspo")["metadata"]["labels"].clear(),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_policy_bites(mutation: str) -> None:
    objects = copy.deepcopy(render("single-gpu"))
    MUTATIONS[mutation](objects)
    assert problems(objects, metrics()) != []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_backoff, "one by one"),
        (_subdomain, "do not meet"),
        (_node_rank, "their numbers"),
        (_one_pod_anew, "is taken away"),
        (_restart, "hangs"),
    ],
)
def test_the_policy_bites_on_gangs(change: Callable[[list[Any]], object], problem: str) -> None:
    objects = copy.deepcopy(render("multi-node"))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


def _unlabelled(objects: list[Any]) -> None:
    del of(objects, "Service", "api")["metadata"]["labels"]["app.kubernetes.io/name"]


def _monitored_port(objects: list[Any]) -> None:
    of(objects, "ServiceMonitor", "api")["spec"]["endpoints"][0]["port"] = "web"


def _fixed_number(objects: list[Any]) -> None:
    of(objects, "Deployment", "rollout")["spec"]["replicas"] = 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [(_unlabelled, "selects no service"), (_monitored_port, "port web"), (_fixed_number, "set its number again")],
)
def test_the_policy_bites_on_what_watches_and_scales(change: Callable[[list[Any]], object], problem: str) -> None:
    objects = copy.deepcopy(render("prod"))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


def test_the_alarms_of_a_cluster_are_those_of_one_host() -> None:
    rules = of(render("prod"), "PrometheusRule", "gspo")["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())
    (endpoint,) = of(render("prod"), "ServiceMonitor", "api")["spec"]["endpoints"]
    name = re.search(r'up\{job="([^"]+)"', str(rules))
    assert name is not None
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": name[1]}]


@pytest.mark.parametrize("component", ["external-redis", "weight-group"])
def test_a_component_that_no_overlay_uses_keeps_what_is_demanded(component: str, tmp_path: Path) -> None:
    above = os.path.relpath(ROOT / "k8s", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{above}/overlays/single-gpu]\ncomponents: [{above}/components/{component}]\nnamespace: gspo\n"
    )
    objects = rendered(tmp_path)
    assert problems(objects, metrics()) == []
    if component == "external-redis":
        assert "redis" not in {one["metadata"]["name"] for one in objects}


def test_ports_and_users_are_those_of_the_containers_of_compose() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    assert {int(port) for port in re.findall(r"^EXPOSE (\d+)", dockerfile, re.MULTILINE)} == {8000, 8010, 8020, 30000}
    objects = render("dev")
    for name, _, template in workloads(objects):
        assert name in services
        ports = {port["containerPort"] for container in containers(template) for port in container.get("ports", ())}
        assert ports <= {6379, 8000, 8010, 8020, 30000}
    targets = set(re.findall(r"^FROM base AS (\S+)", dockerfile, re.MULTILINE)) - {"demo-model"}
    images = {container["image"].split(":")[0] for _, _, one in workloads(objects) for container in containers(one)}
    assert images == {f"gspo-{target}" for target in targets} | {"redis"}
    assert targets == {"api", "rollout", "gateway", "trainer", "engine", "environments"}
