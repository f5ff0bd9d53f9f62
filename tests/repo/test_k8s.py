"""The manifests: every overlay renders, fits the schemas of two versions, and keeps what the project demands."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_core import __version__
from services.api.routes.telemetry import SHOWN
from services.launch import snapshot
from tests.apparatus.k8s.lowered import SERVED, lowered
from tests.repo.manifest_policy import CALLERS, PRIVATE, containers, problems, scaling_behavior, workloads

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
VERSIONS = ("1.31", "1.37")
SCENES = Path(__file__).with_name("engines_wanted.yml")
NAMES = re.compile(r"gspo_\w+")
SHOWN_METRICS = {f"gspo_job_{name.replace('/', '_')}" for name in SHOWN}
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
    fit(render(overlay), version, validate)


def fit(objects: list[dict[str, Any]], version: str, validate: Any) -> None:
    for one in objects:
        if one["kind"] in SCHEMAS:
            assert one["apiVersion"] == SCHEMAS[one["kind"]]["apiVersion"]
            assert misfits(one["spec"], SCHEMAS[one["kind"]]["spec"], one["kind"]) == []
        else:  # a kind without a schema raises
            validate.validate(one, version, strict=True)


OF_OTHERS = ("ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute")


@pytest.mark.parametrize("source", [*OVERLAYS, "engines-autoscaled"])
def test_objects_of_others_fit_the_schemas_that_their_projects_define(source: str) -> None:
    objects = render(source) if source in OVERLAYS else with_component(source)
    found = [one for one in objects if one["kind"] in OF_OTHERS]
    assert refused(found) == []


def test_the_schemas_of_others_refuse_what_does_not_fit() -> None:
    scaler = copy.deepcopy(of(with_component("engines-autoscaled"), "ScaledObject", "engine"))
    monitor = copy.deepcopy(of(render("prod"), "PodMonitor", "engine"))
    scaler["spec"]["triggers"] = {}
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = 15
    assert [line.split(":")[0] for line in refused([scaler, monitor])] == ["ScaledObject engine", "PodMonitor engine"]


@pytest.mark.parametrize(
    ("kind", "name", "at", "known"),
    [
        ("ScaledObject", "rollout", "spec.coolDownPeriod", "spec.cooldownPeriod"),
        ("ScaledObject", "rollout", "spec.advanced.behavior", "spec.advanced.scalingModifiers"),
        ("HTTPRoute", "api", "spec.rules.0.backendRefs.0.portName", "spec.rules.0.backendRefs.0.weight"),
        ("ServiceMonitor", "api", "spec.endpoints.0.metricsPath", "spec.endpoints.0.scrapeTimeout"),
        ("PodMonitor", "engine", "spec.podMetricsEndpoints.0.targets", "spec.podMetricsEndpoints.0.scrapeTimeout"),
        ("PrometheusRule", "gspo", "spec.groups.0.rules.0.keepFor", "spec.groups.0.interval"),
    ],
)
def test_a_field_that_a_definition_does_not_know_is_noticed(kind: str, name: str, at: str, known: str) -> None:
    """A cluster drops it without a word; what the definition knows beside what we set is taken."""
    one = copy.deepcopy(of(render("prod"), kind, name))
    assert not [line for line in refused([_with(one, known, {})]) if "unknown" in line]
    assert refused([_with(one, at, 1)]) == [f"{kind} {name}: .{at} is unknown"]


def _with(one: Any, path: str, value: object) -> Any:
    changed = inner = copy.deepcopy(one)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return changed


def refused(objects: list[dict[str, Any]]) -> list[str]:
    """By the validators that are generated from the definitions of KEDA, the Prometheus operator and Gateway API."""
    modules = os.environ.get("GSPO_TEST_CRDS")
    if modules is None:
        pytest.skip("run by `make test-k8s`, which installs what knows them")
    script = Path(__file__).with_name("fits_definitions.mjs")
    command = ["node", str(script), str(Path(modules).resolve())]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_job_set_fits_the_types_of_its_project() -> None:
    """As Kubeflow's package has them, which is generated from JobSet's own."""
    reason = "run by `make test-k8s`, which installs it"
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set", reason=reason)
    one = of(render("multi-node"), "JobSet", "trainer")

    def lost(changed: Callable[[Any], None]) -> list[str]:
        copied = copy.deepcopy(one)
        changed(copied["spec"])
        return left_out(copied, models.JobsetV1alpha2JobSet.from_dict(copied).to_dict(), "JobSet")

    assert lost(lambda spec: None) == []
    assert lost(lambda spec: spec["failurePolicy"].update(maxRestart=1)) == ["JobSet.spec.failurePolicy.maxRestart"]
    with pytest.raises(ValueError, match="maxRestarts"):
        lost(lambda spec: spec["failurePolicy"].update(maxRestarts="100"))


def left_out(given: Any, taken: Any, at: str) -> list[str]:
    """What of an object its types do not know; what they add is no matter."""
    if isinstance(given, dict) and isinstance(taken, dict):
        parts = [(f"{at}.{name}", value, taken.get(name)) for name, value in given.items()]
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        parts = [(f"{at}[{place}]", *pair) for place, pair in enumerate(zip(given, taken, strict=True))]
    else:
        return [] if given == taken else [at]
    return [path for inner, value, other in parts for path in left_out(value, other, inner)]


def test_the_example_for_kuberay_has_the_fields_of_its_kind() -> None:
    """As KubeRay's types of ray.io/v1 have them; the pods in it are judged like all others."""
    one = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())
    assert one["apiVersion"] == SCHEMAS["RayJob"]["apiVersion"]
    assert misfits(one["spec"], SCHEMAS["RayJob"]["spec"], "RayJob") == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_the_example_for_kuberay_fit_the_schemas(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-k8s`, which installs it")
    cluster = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        validate.validate(pod, version, strict=True)


def misfits(value: Any, schema: Any, at: str) -> list[str]:
    """``schema``: a type name, the words that it may be with | between, a list of one schema, or an object.

    "*" takes anything, a name with ! must be there."""
    if schema == "*":
        return []
    if isinstance(schema, str):
        types = {"string": str, "integer": int, "boolean": bool}
        if schema in types:
            return [] if type(value) is types[schema] else [f"{at} is not of type {schema}"]
        return [] if value in schema.split("|") else [f"{at} is not {schema}"]
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


def test_a_group_of_engines_with_a_word_that_its_kind_does_not_know_is_refused() -> None:
    group = copy.deepcopy(of(render("multi-node"), "LeaderWorkerSet", "engine"))["spec"]
    assert misfits(group, SCHEMAS["LeaderWorkerSet"]["spec"], "") == []
    group["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    assert len(misfits(group, SCHEMAS["LeaderWorkerSet"]["spec"], "")) == 1


def test_a_group_of_engines_with_a_field_that_its_kind_does_not_know_is_refused() -> None:
    """The list holds all fields of the kind: those that we do not set are taken, and no others."""
    group = of(render("multi-node"), "LeaderWorkerSet", "engine")
    policy = "spec.leaderWorkerTemplate.subGroupPolicy"
    known = _with(
        _with(group, policy, {"subGroupSize": 1}), "spec.rolloutStrategy.rollingUpdateConfiguration.partition", 0
    )
    assert misfits(known["spec"], SCHEMAS["LeaderWorkerSet"]["spec"], "") == []
    unknown = _with(known, f"{policy}.size", 1)
    assert misfits(unknown["spec"], SCHEMAS["LeaderWorkerSet"]["spec"], "") == [
        ".leaderWorkerTemplate.subGroupPolicy.size is unknown"
    ]


def test_kueue_is_asked_by_the_label_that_it_reads() -> None:
    """It reads the JobSet's own labels; what is misspelt is admitted by nobody and starts at once."""
    labels = of(render("multi-node"), "JobSet", "trainer")["metadata"]["labels"]
    assert {name for name in labels if "kueue" in name} == {"kueue.x-k8s.io/queue-name"}


def test_keda_lets_workers_go_as_the_autoscaler_does_that_it_replaces() -> None:
    (ours,) = [one for one in render("two-gpus") if one["kind"] == "HorizontalPodAutoscaler"]
    theirs = of(render("prod"), "ScaledObject", ours["metadata"]["name"])
    assert "HorizontalPodAutoscaler" not in {one["kind"] for one in render("prod")}
    assert scaling_behavior(theirs) == scaling_behavior(ours)
    least, most = theirs["spec"]["minReplicaCount"], theirs["spec"]["maxReplicaCount"]
    assert (least, most) == (ours["spec"]["minReplicas"], ours["spec"]["maxReplicas"])
    (trigger,), (metric,) = theirs["spec"]["triggers"], ours["spec"]["metrics"]
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"]


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


def _half_of_rdma(objects: list[Any]) -> None:
    del pod(objects, "trainer")["containers"][0]["resources"]["requests"]["rdma/rdma_shared_device_a"]


def _restart(objects: list[Any]) -> None:
    of(objects, "LeaderWorkerSet", "engine")["spec"]["leaderWorkerTemplate"].pop("restartPolicy")


def _open_to_all(objects: list[Any]) -> None:
    words = first(objects, "engine")["args"]
    at = words.index("--config")
    del words[at : at + 2]


def _keys_in_one_word(objects: list[Any]) -> None:
    words = first(objects, "engine")["args"]
    at = words.index("--config")
    words[at : at + 2] = ["--config=/secrets/sglang.yaml"]


def _keys_apart(objects: list[Any]) -> None:
    words = first(objects, "engine")["args"]
    words.insert(words.index("--config") + 1, "--enable-metrics")


def _member_without_secrets(objects: list[Any]) -> None:
    mounts = first(objects, "engine member")["volumeMounts"]
    mounts[:] = [one for one in mounts if one["name"] != "secrets"]


def _all_settings(objects: list[Any]) -> None:
    first(objects, "environments")["envFrom"] = [{"configMapRef": {"name": "gspo-settings"}}]


def _another_setting(objects: list[Any]) -> None:
    first(objects, "environments")["env"].append({"name": "GSPO_REDIS_URL", "value": "redis://redis:6379/0"})


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
    [(_all_settings, "are told all settings"), (_another_setting, "are told GSPO_REDIS_URL")],
)
def test_environments_are_told_nothing_that_they_do_not_read(
    change: Callable[[list[Any]], object], problem: str
) -> None:
    objects = copy.deepcopy(render("dev"))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_backoff, "one by one"),
        (_subdomain, "do not meet"),
        (_node_rank, "their numbers"),
        (_one_pod_anew, "is taken away"),
        (_restart, "hangs"),
        (_half_of_rdma, "limits of devices differ"),
        (_open_to_all, "engine asks for no key"),
        (_keys_in_one_word, "engine asks for no key"),
        (_keys_apart, "engine asks for no key"),
        (_member_without_secrets, "engine member asks for no key"),
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


def _unwatched_engines(objects: list[Any]) -> None:
    of(objects, "PodMonitor", "engine")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] = "engines"


def _whole_namespace(objects: list[Any]) -> None:
    del of(objects, "NetworkPolicy", "engine-from-prometheus")["spec"]["ingress"][0]["from"][0]["podSelector"]


def _kept_from_gpus(objects: list[Any]) -> None:
    del pod(objects, "trainer")["tolerations"]


def _all_at_once(objects: list[Any]) -> None:
    del of(objects, "ScaledObject", "rollout")["spec"]["advanced"]


def _fixed_number(objects: list[Any]) -> None:
    of(objects, "Deployment", "rollout")["spec"]["replicas"] = 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_unlabelled, "selects no service"),
        (_monitored_port, "port web"),
        (_unwatched_engines, "selects no pod"),
        (_whole_namespace, "engine is reached"),
        (_kept_from_gpus, "may not go where GPUs are"),
        (_fixed_number, "set its number again"),
        (_all_at_once, "let go all at once"),
    ],
)
def test_the_policy_bites_on_what_watches_and_scales(change: Callable[[list[Any]], object], problem: str) -> None:
    objects = copy.deepcopy(render("prod"))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_overrides_no_setting_but_what_is_its_own(overlay: str) -> None:
    """What stands in a pod's `env` wins over `gspo-settings`: an overlay that merges it there would change nothing."""
    for name, _, template in workloads(render(overlay)):
        for container in containers(template):
            if "configMapRef" in str(container.get("envFrom", ())):
                set_here = {one["name"] for one in container.get("env", ()) if one["name"].startswith("GSPO_")}
                assert set_here <= {"GSPO_HEALTH_FILE", "GSPO_GATEWAY_OWN_URL"}, name


def test_the_alarms_of_a_cluster_are_those_of_one_host() -> None:
    rules = of(render("prod"), "PrometheusRule", "gspo")["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())
    (endpoint,) = of(render("prod"), "ServiceMonitor", "api")["spec"]["endpoints"]
    name = re.search(r'up\{job="([^"]+)"', str(rules))
    assert name is not None
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": name[1]}]


COMPONENTS = (
    *("external-redis", "weight-group", "backup", "backup-continuous", "model-loader", "ingress", "engines-autoscaled"),
    "remote-worlds",
)
"""Those that no overlay uses."""
SCALED = {"engines-scaled": "StatefulSet", "prod": "StatefulSet", "multi-node": "LeaderWorkerSet"}
"""Where engines are announced: as what kind they run."""
BESIDE = {"engines-autoscaled": ("engines-scaled",)}
"""What a component needs before it."""


@cache
def with_component(component: str, overlay: str = "two-gpus") -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        above = os.path.relpath(ROOT / "k8s", folder)
        has = (ROOT / "k8s" / "overlays" / overlay / "kustomization.yaml").read_text()
        before = [one for one in BESIDE.get(component, ()) if f"components/{one}" not in has]
        components = [f"{above}/components/{one}" for one in (*before, component)]
        (Path(folder) / "kustomization.yaml").write_text(
            f"resources: [{above}/overlays/{overlay}]\ncomponents: {json.dumps(components)}\nnamespace: gspo\n"
        )
        return rendered(Path(folder))


def test_every_component_is_looked_at() -> None:
    used = "".join(path.read_text() for path in (ROOT / "k8s" / "overlays").rglob("kustomization.yaml"))
    there = {path.name for path in (ROOT / "k8s" / "components").iterdir()}
    assert {one for one in there if f"components/{one}" not in used} == set(COMPONENTS)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_that_no_overlay_uses_keeps_what_is_demanded(component: str) -> None:
    objects = with_component(component)
    assert problems(objects, metrics()) == []
    if component == "external-redis":
        assert "redis" not in {one["metadata"]["name"] for one in objects}


@pytest.mark.parametrize(("overlay", "modes"), [("dev", ["ReadWriteOnce"]), ("two-gpus", ["ReadWriteMany"])])
@pytest.mark.parametrize("component", ["backup", "backup-continuous"])
def test_backups_go_to_a_claim_that_is_served_where_that_of_the_data_is(
    component: str, overlay: str, modes: list[str]
) -> None:
    """Also where an overlay builds upon `dev`, whose own patches have been applied then."""
    objects = with_component(component, overlay)
    assert problems(objects, metrics()) == []
    claims = [of(objects, "PersistentVolumeClaim", name)["spec"] for name in (component, "data")]
    assert claims[0] == claims[1]
    assert claims[0]["accessModes"] == modes


def test_whoever_calls_redis_reaches_one_of_somebody_else() -> None:
    objects = with_component("external-redis", "prod")
    assert problems(objects, metrics()) == []
    [those] = of(objects, "NetworkPolicy", "external-redis")["spec"]["podSelector"]["matchExpressions"]
    assert set(those["values"]) == CALLERS["redis"]
    assert CALLERS["redis"] <= {name for name, _, _ in workloads(objects)}


@pytest.mark.parametrize("overlay", ["two-gpus", "multi-node"])
def test_a_group_for_weights_has_every_pod_in_which_an_engine_has_ranks(overlay: str) -> None:
    """Each rank is a member of the group, those of an engine's further nodes too."""
    objects = with_component("weight-group", overlay)
    assert problems(objects, metrics()) == []
    engines = [one["metadata"]["labels"] for name, _, one in workloads(objects) if name.startswith("engine")]
    receives = of(objects, "NetworkPolicy", "weight-group-engine")["spec"]["podSelector"]["matchLabels"]
    sends = of(objects, "NetworkPolicy", "weight-group-trainer")["spec"]
    reached = [peer["podSelector"]["matchLabels"] for one in sends["egress"] for peer in one["to"]]
    let_in = [peer["podSelector"]["matchLabels"] for one in sends["ingress"] for peer in one["from"]]
    for selector in (receives, *reached, *let_in):
        assert all(selector.items() <= labels.items() for labels in engines)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_fits_the_schemas(component: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="run by `make test-k8s`, which installs it")
    fit(with_component(component), version, validate)


def _way_out(objects: list[Any]) -> None:
    of(objects, "NetworkPolicy", "backup")["spec"]["egress"][0]["to"][0]["ipBlock"]["except"].remove("169.254.0.0/16")


def _announced(objects: list[Any]) -> None:
    peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "environments"}}}
    of(objects, "NetworkPolicy", "redis-from-announcer")["spec"]["ingress"][0]["from"].append(peer)


def _backend(objects: list[Any]) -> None:
    (rule,) = of(objects, "Ingress", "api")["spec"]["rules"]
    rule["http"]["paths"][0]["backend"]["service"]["port"]["name"] = "web"


def _everywhere(objects: list[Any]) -> None:
    block = of(objects, "NetworkPolicy", "remote-worlds")["spec"]["egress"][0]["to"][0]["ipBlock"]
    block.update(cidr="0.0.0.0/0", **{"except": sorted(PRIVATE)})


def _no_such_engines(objects: list[Any]) -> None:
    of(objects, "ScaledObject", "engine")["spec"]["scaleTargetRef"]["kind"] = "Deployment"


def _set_again(objects: list[Any]) -> None:
    of(objects, "StatefulSet", "engine")["spec"]["replicas"] = 1


COMPONENT_MUTATIONS: dict[str, tuple[str, Callable[[list[Any]], object], str]] = {
    "twice at once": ("backup", lambda all: of(all, "CronJob", "backup")["spec"].pop("concurrencyPolicy"), "twice"),
    "no end": ("model-loader", lambda all: of(all, "Job", "model-loader")["spec"].pop("backoffLimit"), "no end"),
    "overwritten": ("model-loader", lambda all: pod(all, "model-loader").update(restartPolicy="OnFailure"), "next try"),
    "keys of a cloud": ("backup", _way_out, "private addresses"),
    "environments at redis": ("engines-scaled", _announced, "redis is reached"),
    "without TLS": ("ingress", lambda all: of(all, "Ingress", "api")["spec"].pop("tls"), "without TLS"),
    "no such port": ("ingress", _backend, "does not exist"),
    "worlds everywhere": ("remote-worlds", _everywhere, "everywhere"),
    "no such engines": ("engines-autoscaled", _no_such_engines, "does not exist"),
    "engines set again": ("engines-autoscaled", _set_again, "set its number again"),
    "any secret": ("backup", lambda all: first(all, "backup")["envFrom"][0]["secretRef"].update(name="x"), "a secret"),
}


@pytest.mark.parametrize("mutation", COMPONENT_MUTATIONS)
def test_the_policy_bites_on_components(mutation: str) -> None:
    component, change, problem = COMPONENT_MUTATIONS[mutation]
    objects = copy.deepcopy(with_component(component))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


def test_a_single_gpu_is_shared_by_what_needs_one() -> None:
    objects, whole = render("single-gpu"), render("two-gpus")
    for name in ("engine", "trainer"):
        limits = first(objects, name)["resources"]["limits"]
        assert (limits.get("nvidia.com/gpu"), limits["nvidia.com/gpu.shared"]) == (None, "1")
        assert first(whole, name)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "--mem-fraction-static=0.4" in first(objects, "engine")["args"]


@pytest.mark.parametrize(("source", "kind"), SCALED.items())
def test_engines_that_are_scaled_stand_in_no_setting(source: str, kind: str) -> None:
    """So `kubectl scale` is all that a new one needs, and what reads the settings is not rolled."""
    objects = render(source) if source in OVERLAYS else with_component(source)
    (urls,) = {
        one["data"]["GSPO_ENGINE_URLS"]
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("gspo-settings")
    }
    assert urls == ""
    (port,) = first(objects, "engine")["ports"]
    names = [f"http://engine-{number}.engine:{port['containerPort']}" for number in range(16)]
    assert first(objects, "announcer")["args"] == names
    assert of(objects, kind, "engine")["spec"]["replicas"] <= 16
    admits = of(objects, "NetworkPolicy", "engine-from-announcer")["spec"]["podSelector"]["matchLabels"]
    (labels,) = [pod["metadata"]["labels"] for name, _, pod in workloads(objects) if name == "engine"]
    assert admits.items() <= labels.items()


@pytest.mark.parametrize("overlay", ["two-gpus", "prod"])
def test_engines_may_be_scaled_by_need_whether_or_not_an_overlay_announces_them(overlay: str) -> None:
    objects = with_component("engines-autoscaled", overlay)
    assert problems(objects, metrics()) == []
    assert "replicas" not in of(objects, "StatefulSet", "engine")["spec"]


def _seventeen(objects: list[Any]) -> None:
    of(objects, "StatefulSet", "engine")["spec"]["replicas"] = 17


def _listed_twice(objects: list[Any]) -> None:
    (settings,) = [one for one in objects if one["metadata"]["name"].startswith("gspo-settings")]
    settings["data"]["GSPO_ENGINE_URLS"] = "http://engine-0.engine:30000"


def _unannounced(objects: list[Any]) -> None:
    objects.remove(of(objects, "Deployment", "announcer"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_seventeen, "engine-16.engine:30000 is an engine"),
        (_listed_twice, "stays on the list"),
        (_unannounced, "nobody lists"),
    ],
)
def test_the_policy_bites_on_engines_that_nobody_lists(change: Callable[[list[Any]], object], problem: str) -> None:
    objects = copy.deepcopy(render("prod"))
    change(objects)
    assert any(problem in one for one in problems(objects, metrics()))


def test_the_most_engines_by_need_are_those_that_are_announced() -> None:
    scaler = of(with_component("engines-autoscaled"), "ScaledObject", "engine")["spec"]
    assert scaler["maxReplicaCount"] == 16
    (trigger,) = scaler["triggers"]
    (scene,) = yaml.safe_load(SCENES.read_text())["tests"]
    assert {one["expr"] for one in scene["promql_expr_test"]} == {trigger["metadata"]["query"]}


def test_the_dashboard_of_a_cluster_is_that_of_one_host_and_asks_the_same_source() -> None:
    boards = of(render("prod"), "ConfigMap", "gspo-dashboard")
    board = json.loads(boards["data"]["gspo.json"])
    assert board == json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "gspo.json").read_text())
    source = yaml.safe_load(of(render("prod"), "ConfigMap", "gspo-datasource")["data"]["datasource.yaml"])
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {one["uid"] for one in source["datasources"]}
    asked = {name for panel in board["panels"] for one in panel["targets"] for name in NAMES.findall(one["expr"])}
    assert asked
    assert {re.sub("_(total|bucket)$", "", name) for name in asked} <= metrics() | SHOWN_METRICS


def test_what_is_saved_again_and_again_has_a_place_of_its_own_and_one_that_saves() -> None:
    """It removes old snapshots, and nights of `backup` are none of its own; two at once would take turns."""
    objects = with_component("backup-continuous")
    saving, bringing = of(objects, "Deployment", "backup-continuous")["spec"], first(objects, "restore-continuous")
    assert (saving["replicas"], saving["strategy"]) == (1, {"type": "Recreate"})
    snapshot.add_options(parser := argparse.ArgumentParser())
    given = parser.parse_args(first(objects, "backup-continuous")["args"])
    assert (given.action, given.follow, given.bucket) == ("save", True, bringing["args"][1])
    assert parser.parse_args(bringing["args"]).action == "restore"
    names = {one["metadata"]["name"] for one in objects} & {one["metadata"]["name"] for one in with_component("backup")}
    assert not [name for name in names if name.endswith("backup")]
    mounts = {one["name"]: one.get("readOnly") for one in first(objects, "backup-continuous")["volumeMounts"]}
    assert mounts == {"tmp": None, "data": True, "backup": None}


@pytest.mark.parametrize("component", ["backup", "backup-continuous", "model-loader"])
def test_a_pod_that_has_ended_is_none_that_the_page_waits_to_see_go(component: str) -> None:
    """It stays until its job is deleted, behind these lines."""
    page = (ROOT / "docs" / "operations.md").read_text()
    waits = re.findall(r"--for=delete pod .*name in \(([^)]*)\)", page)
    waited = {name for names in waits for name in names.split(", ")}
    assert {"backup-continuous", "redis"} <= waited
    jobs = [one for _, owner, one in workloads(with_component(component)) if owner["kind"] in ("Job", "CronJob")]
    assert jobs
    assert not waited & {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in jobs}


def test_images_hold_what_their_jobs_run() -> None:
    """The bucket's package is an extra, and no test of a job in a cluster's manifests would miss it."""
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    (light,) = re.findall(r"pip install .*-r light.txt.*", dockerfile)
    assert "-r bucket.txt" in light
    for component in ("backup", "backup-continuous", "model-loader"):
        for name, owner, template in workloads(with_component(component)):
            if owner["kind"] in ("Job", "CronJob") or name == component:
                assert {one["image"] for one in containers(template)} == {f"gspo-api:{__version__}"}, name


def test_what_a_test_cluster_is_given_differs_only_as_it_tells() -> None:
    objects = rendered(ROOT / "tests" / "apparatus" / "k8s" / "overlay")
    assert problems(objects, metrics()) == []
    changed, told = lowered(objects)
    kinds = {(one["apiVersion"], one["kind"]) for one in changed}
    assert not kinds & SERVED.keys()
    assert len(told) == len(set(told))
    differing = [new for old, new in zip(objects, changed, strict=True) if old != new]
    assert {f"{one['kind']} {one['metadata']['name']}" for one in differing} == {one.split(":")[0] for one in told}


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
