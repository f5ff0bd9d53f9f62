"""What every rendered manifest must keep and no schema sees. ``problems(objects)`` names each thing that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from services.launch.first_secrets import ROLES
from services.launch.topology import ENVIRONMENTS
from services.process.settings import PREFIX, Settings

Object = Mapping[str, Any]

SECRETS = {*(f"gspo-{role}" for role in ROLES), "gspo-engine", "gspo-environments", "gspo-redis"}
"""Made by `services.launch.first_secrets`; never in the tree."""
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}
OTHERS_VARIABLES = {
    *("HOME", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "PET_NODE_RANK",  # of torchrun
    "POD_IP",  # for values that are made of it
    *("OMP_NUM_THREADS", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"),
}
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SINGLETONS = {"redis", "trainer"}
DRAIN_S = {"--drain-s": 10, "--grace-s": 10}
"""Arguments that take seconds, and how much longer the pod has to be given."""
SLOW_TO_START_S = 45 * 60
RUNS_TO_ITS_END = ("Job", "CronJob")
PRIVATE = {"10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}
"""Addresses of clusters and, in 169.254, of what tells a machine of a cloud its keys."""
CALLERS = {
    "redis": {"announcer", "api", "gateway", "rollout", "trainer"},
    "engine": {"announcer", "engine", "gateway", "monitoring/prometheus", "rollout", "trainer"},
    "environments": {"gateway", "rollout"},
}
UNITS = {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "kb": 2**10, "mb": 2**20, "gb": 2**30}


def quantity(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * UNITS[match[2]]


def workloads(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Name, what it is in, pod template: of everything that makes pods."""
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        match one["kind"]:
            case "Deployment" | "StatefulSet":
                yield name, one, spec["template"]
            case "Job":
                yield name, one, spec["template"]
            case "CronJob":
                yield name, one, spec["jobTemplate"]["spec"]["template"]
            case "JobSet":
                for job in spec["replicatedJobs"]:
                    yield name, one, job["template"]["spec"]["template"]
            case "LeaderWorkerSet":
                yield name, one, spec["leaderWorkerTemplate"]["leaderTemplate"]
                yield f"{name} member", one, spec["leaderWorkerTemplate"]["workerTemplate"]


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def problems(objects: Sequence[Object], metrics: set[str]) -> list[str]:
    """``metrics``: the names that the code exports."""
    rules: list[Callable[[Sequence[Object]], Iterator[str]]] = [
        _identity, _pods, _images, _selectors, _references, _resources,
        _probes, _runs, _disruption, _networks, _walls, _ways_out, _doors, _redis, _gangs, _engines, _keys,
    ]  # fmt: skip
    found = [problem for rule in rules for problem in rule(objects)]
    for one in objects:
        found += _scaling(one, objects, metrics)
    return found


def _identity(objects: Sequence[Object]) -> Iterator[str]:
    ids = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in objects]
    yield from (f"{one} is there twice" for one in set(ids) if ids.count(one) > 1)
    namespaces = [one for one in objects if one["kind"] == "Namespace"]
    for one in namespaces:
        labels = one["metadata"].get("labels", {})
        for what in ("enforce", "audit", "warn"):
            if labels.get(f"pod-security.kubernetes.io/{what}") != "restricted":
                yield f"the namespace does not {what} restricted"
    if len(namespaces) != 1:
        yield "there is not one namespace"
    for one in objects:
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") != "gspo":
            yield f"{one['kind']} {one['metadata']['name']} is in no namespace of ours"
        if one["kind"] == "Secret":
            yield f"the secret {one['metadata']['name']} is in the tree"
        if one["kind"] == "Service" and one["spec"].get("type", "ClusterIP") != "ClusterIP":
            yield f"the service {one['metadata']['name']} leads out of the cluster"


def _pods(objects: Sequence[Object]) -> Iterator[str]:
    for name, _, template in workloads(objects):
        pod = template["spec"]
        security = pod.get("securityContext", {})
        if not security.get("runAsNonRoot") or not security.get("runAsUser"):
            yield f"{name} may run as root"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name} has no seccomp profile"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name} gets a token of the cluster"
        if pod.get("enableServiceLinks") is not False:
            yield f"{name} gets the addresses of all services"
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(forbidden):
                yield f"{name} has {forbidden}"
        for volume in pod.get("volumes", ()):
            if not set(volume) - {"name"} <= {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}:
                yield f"{name} mounts {volume}"
            if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
                yield f"{name}: the volume {volume['name']} has no size"
        for container in containers(template):
            yield from _container(name, container)


def _container(name: str, container: Object) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield f"{name} may gain privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{name} can write to its root"
    if security.get("capabilities", {}) != {"drop": ["ALL"]}:
        yield f"{name} keeps capabilities"
    for port in container.get("ports", ()):
        if "hostPort" in port:
            yield f"{name} takes a port of its node"
    names = [variable["name"] for variable in container.get("env", ())]
    yield from (f"{name}: {one} is set twice" for one in set(names) if names.count(one) > 1)
    for one in names:
        if one not in SETTINGS | OTHERS_VARIABLES:
            yield f"{name}: {one} is no setting"
    for variable in container.get("env", ()):
        if re.search(r"PASSWORD|TOKEN$|KEYS?$", variable["name"]):
            yield f"{name}: {variable['name']} is a secret in the tree"


def _images(objects: Sequence[Object]) -> Iterator[str]:
    for name, _, template in workloads(objects):
        for container in containers(template):
            image, _, tag = container["image"].rpartition(":")
            if "@sha256" not in container["image"] and (not image or tag == "latest" or "/" in tag):
                yield f"{name}: the image {container['image']} has no version"
            if container.get("imagePullPolicy") != "IfNotPresent":
                yield f"{name}: its image is pulled at every start"


def _selectors(objects: Sequence[Object]) -> Iterator[str]:
    templates = [template for _, _, template in workloads(objects)]
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            wanted = one["spec"]["selector"]["matchLabels"]
            if not wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items():
                yield f"{one['metadata']['name']} does not select its own pods"
        if one["kind"] == "Service":
            wanted = one["spec"]["selector"]
            chosen = [each for each in templates if wanted.items() <= each["metadata"]["labels"].items()]
            if not chosen:
                yield f"the service {one['metadata']['name']} selects nothing"
            open_ports = {
                p["name"]: p["containerPort"] for each in chosen for c in containers(each) for p in c.get("ports", ())
            }
            for port in one["spec"]["ports"]:
                target = port.get("targetPort")
                if target is not None and target not in open_ports:
                    yield f"the service {one['metadata']['name']} leads to a port {target} that does not exist"
        if one["kind"] == "ServiceMonitor":
            yield from _watched(one, [other for other in objects if other["kind"] == "Service"])
        if one["kind"] == "PodMonitor":
            yield from _watched_pods(one, templates)
        if one["kind"] == "PodDisruptionBudget" and not any(
            one["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items() for each in templates
        ):
            yield f"the budget {one['metadata']['name']} selects nothing"


def _watched(monitor: Object, services: Sequence[Object]) -> Iterator[str]:
    """Monitors select Services by the labels of these, not by what these select."""
    name, wanted = monitor["metadata"]["name"], monitor["spec"]["selector"]["matchLabels"].items()
    chosen = [one for one in services if wanted <= one["metadata"].get("labels", {}).items()]
    if not chosen:
        yield f"the monitor {name} selects no service"
    ports = {port["name"] for one in chosen for port in one["spec"]["ports"]}
    for endpoint in monitor["spec"]["endpoints"]:
        if endpoint["port"] not in ports:
            yield f"the monitor {name} asks a port {endpoint['port']} that does not exist"


def _watched_pods(monitor: Object, templates: Sequence[Object]) -> Iterator[str]:
    name, wanted = monitor["metadata"]["name"], monitor["spec"]["selector"]["matchLabels"].items()
    chosen = [one for one in templates if wanted <= one["metadata"]["labels"].items()]
    if not chosen:
        yield f"the monitor {name} selects no pod"
    ports = {port["name"] for one in chosen for each in containers(one) for port in each.get("ports", ())}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        if endpoint["port"] not in ports:
            yield f"the monitor {name} asks a port {endpoint['port']} that does not exist"


def _references(objects: Sequence[Object]) -> Iterator[str]:
    def named(kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in objects if one["kind"] == kind}

    for name, owner, template in workloads(objects):
        pod = template["spec"]
        claims = {one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", ())}
        if pod.get("serviceAccountName") not in named("ServiceAccount"):
            yield f"{name} has no service account of its own"
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for volume in volumes.values():
            if "secret" in volume and volume["secret"]["secretName"] not in SECRETS:
                yield f"{name} mounts an unknown secret"
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                if claim not in named("PersistentVolumeClaim"):
                    yield f"{name} mounts the claim {claim}, which does not exist"
        for container in containers(template):
            yield from _used(name, container, volumes.keys() | claims, named("ConfigMap"))
    for one in objects:
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("gspo-settings"):
            yield from (f"{key} is no setting" for key in one["data"] if key not in SETTINGS)


def _used(name: str, container: Object, volumes: set[str], config_maps: set[str]) -> Iterator[str]:
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"{name} mounts {mount['name']}, which is no volume"
    for source in container.get("envFrom", ()):
        if "configMapRef" in source and source["configMapRef"]["name"] not in config_maps:
            yield f"{name} reads a config map that does not exist"
        if "secretRef" in source and source["secretRef"] != {"name": "gspo-bucket", "optional": True}:
            yield f"{name} reads a secret into its environment"


def _resources(objects: Sequence[Object]) -> Iterator[str]:
    for name, _, template in workloads(objects):
        for container in containers(template):
            requests = container.get("resources", {}).get("requests", {})
            limits = container.get("resources", {}).get("limits", {})
            try:
                for what in ("cpu", "memory", "ephemeral-storage"):
                    if what not in requests:
                        yield f"{name} requests no {what}"
                    if what != "cpu" and what not in limits:
                        yield f"{name} has no limit of {what}"
                    if what in limits and what in requests and quantity(requests[what]) > quantity(limits[what]):
                        yield f"{name} requests more {what} than its limit"
                if "cpu" in limits:
                    yield f"{name} has a limit of cpu: beats would come late"
                if _devices(requests) != _devices(limits):
                    yield f"{name}: requests and limits of devices differ"
                if any(what.startswith("nvidia.com/") for what in limits) and not _goes_to_gpus(template):
                    yield f"{name} asks for a GPU and may not go where GPUs are"
            except ValueError as error:
                yield f"{name}: {error}"


def _devices(resources: Object) -> dict[str, str]:
    return {what: number for what, number in resources.items() if "/" in what}


def _goes_to_gpus(template: Object) -> bool:
    """Nodes with GPUs are kept for what tolerates this."""
    wanted = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return wanted in template["spec"].get("tolerations", ())


def _probes(objects: Sequence[Object]) -> Iterator[str]:
    for name, owner, template in workloads(objects):
        if owner["kind"] in RUNS_TO_ITS_END:
            continue
        for container in containers(template):
            ports = {port["name"] for port in container.get("ports", ())}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind)
                if probe is None:
                    yield f"{name} has no {kind}"
                    continue
                port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
                if port is not None and port not in ports:
                    yield f"{name}: its {kind} asks a port {port} that does not exist"
            live = str(container.get("livenessProbe"))
            if "/readyz" in live or "--ready" in live:
                yield f"{name}: whether it lives depends on others"
            startup = container.get("startupProbe") or {}
            takes_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
            if name.split()[0] in ("trainer", "engine") and takes_s < SLOW_TO_START_S:
                yield f"{name} has {takes_s} s to start"
            given = dict(zip(container.get("args", ()), container.get("args", ())[1:], strict=False))
            given |= dict(one.split("=", 1) for one in container.get("args", ()) if "=" in one)
            grace_s = template["spec"].get("terminationGracePeriodSeconds", 30)
            for argument, more_s in DRAIN_S.items():
                if argument in given and float(given[argument]) + more_s > grace_s:
                    yield f"{name} drains {given[argument]} s of {grace_s}"


def _runs(objects: Sequence[Object]) -> Iterator[str]:
    """Jobs end, are not begun twice at once, and leave their pods to be looked at."""
    for name, owner, template in workloads(objects):
        if owner["kind"] not in RUNS_TO_ITS_END:
            continue
        spec = owner["spec"]
        job = spec["jobTemplate"]["spec"] if owner["kind"] == "CronJob" else spec
        if "activeDeadlineSeconds" not in job or "backoffLimit" not in job:
            yield f"{name} has no end"
        if template["spec"].get("restartPolicy") != "Never":
            yield f"{name}: what went wrong is overwritten by the next try"
        if owner["kind"] == "CronJob" and spec.get("concurrencyPolicy") != "Forbid":
            yield f"{name} may run twice at once"


def _disruption(objects: Sequence[Object]) -> Iterator[str]:
    budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in objects if one["kind"] in SCALERS}
    for budget in budgets:
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield "a budget lets a broken pod keep its node"
    for name, owner, template in workloads(objects):
        labels = template["metadata"]["labels"].items()
        mine = [budget for budget in budgets if budget["selector"]["matchLabels"].items() <= labels]
        if name in scaled and "replicas" in owner["spec"]:
            yield f"{name} is scaled, and every apply would set its number again"
        if owner["kind"] == "Deployment" and (name in scaled or owner["spec"].get("replicas", 1) >= 2) and not mine:
            yield f"{name} has no budget"
        if name in SINGLETONS and mine:
            yield f"{name} is one, and keeps its node from being drained"
        if any("minAvailable" in budget for budget in mine):
            yield f"{name}: a budget with minAvailable"


def _networks(objects: Sequence[Object]) -> Iterator[str]:
    policies = _policies(objects)
    deny = policies.get("default-deny", {})
    if deny.get("podSelector") != {} or sorted(deny.get("policyTypes", ())) != ["Egress", "Ingress"]:
        yield "nothing is denied by default"
    for name, policy in policies.items():
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy.get(direction, ()):
                if not rule.get(peers) or {} in rule[peers]:
                    yield f"the policy {name} lets everything in or out"
    if not any(
        rule.get("ports") == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
        for rule in policies.get("dns", {}).get("egress", ())
    ):
        yield "names are not resolved over UDP and TCP"
    for name, _, template in workloads(objects):
        labels = template["metadata"]["labels"]
        if name != "redis" and not any(
            (policy["podSelector"].get("matchLabels") or {"": ""}).items() <= labels.items()
            for policy in policies.values()
        ):
            yield f"no rule is about {name}"


def _walls(objects: Sequence[Object]) -> Iterator[str]:
    policies = _policies(objects)
    wall = policies.get("environments", {})
    only_gateway = {
        "to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}],
        "ports": [{"protocol": "TCP", "port": 8020}],
    }
    if wall.get("egress") != [only_gateway] or "Egress" not in wall.get("policyTypes", ()):
        yield "environments reach more than the gateway"
    if _callers(wall) != {"gateway", "rollout"}:
        yield f"environments are reached by {_callers(wall)}"
    if "environments" not in str(policies.get("dns", {}).get("podSelector")):
        yield "environments may ask for names"
    for name, _, template in workloads(objects):
        if name == "environments":
            yield from _told(template)
    if "redis" in policies and _callers(policies["redis"]) != {"api", "gateway", "rollout", "trainer"}:
        yield f"redis is reached by {_callers(policies['redis'])}"
    for policy in policies.values():  # they add up
        about = policy["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name")
        if about in CALLERS and _callers(policy) - CALLERS[about]:
            yield f"{about} is reached by {_callers(policy)}"


def _told(template: Object) -> Iterator[str]:
    """What a policy writes may read what its container is told."""
    for container in containers(template):
        if "envFrom" in container:
            yield "environments are told all settings"
        names = {variable["name"] for variable in container.get("env", ())}
        for one in sorted(names - {PREFIX + name.upper() for name in ENVIRONMENTS.reads}):
            yield f"environments are told {one}, which they do not read"


def _ways_out(objects: Sequence[Object]) -> Iterator[str]:
    """Who may leave the cluster reaches no private address, and speaks TLS only."""
    for name, policy in _policies(objects).items():
        for rule in policy.get("egress", ()):
            blocks = [peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer]
            wide = [one for one in blocks if one["cidr"] == "0.0.0.0/0"]
            if any(not set(one.get("except", ())) >= PRIVATE for one in wide):
                yield f"{name} leads to private addresses"
            if wide and rule.get("ports") != [{"protocol": "TCP", "port": 443}]:
                yield f"{name} leads out over more than 443"
            if wide and _is_about(policy, "environments"):
                yield f"{name} leads environments everywhere"


def _is_about(policy: Object, name: str) -> bool:
    selector = policy["podSelector"]
    if selector.get("matchLabels", {}).get("app.kubernetes.io/name", name) != name:
        return False
    meant = {"In": True, "NotIn": False}
    return all((name in one["values"]) == meant[one["operator"]] for one in selector.get("matchExpressions", ()))


def _doors(objects: Sequence[Object]) -> Iterator[str]:
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    for one in objects:
        if one["kind"] != "Ingress":
            continue
        hosts = {rule["host"] for rule in one["spec"]["rules"]}
        if hosts != {host for tls in one["spec"].get("tls", ()) for host in tls["hosts"]}:
            yield "the ingress speaks without TLS"
        for backend in (path["backend"]["service"] for rule in one["spec"]["rules"] for path in rule["http"]["paths"]):
            ports = [port["name"] for port in services.get(backend["name"], {}).get("ports", ())]
            if backend["port"]["name"] not in ports:
                yield f"the ingress leads to {backend}, which does not exist"


def _policies(objects: Sequence[Object]) -> Mapping[str, Any]:
    return {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "NetworkPolicy"}


def _callers(policy: Object) -> set[str]:
    peers = [peer for rule in policy.get("ingress", ()) for peer in rule.get("from", ())]
    return {_caller(peer) for peer in peers}


def _caller(peer: Object) -> str:
    name = str(peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name", "?"))
    if "namespaceSelector" not in peer:
        return name
    return f"{peer['namespaceSelector'].get('matchLabels', {}).get('kubernetes.io/metadata.name', '?')}/{name}"


def _redis(objects: Sequence[Object]) -> Iterator[str]:
    for name, _, template in workloads(objects):
        if name != "redis":
            continue
        (container,) = containers(template)
        for wanted in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "--aclfile "):
            if not any(argument.startswith(wanted) for argument in container["args"]):
                yield f"redis runs without {wanted}"
        most = [one.split()[1] for one in container["args"] if one.startswith("--maxmemory ")]
        if not most or quantity(most[0]) >= quantity(container["resources"]["limits"]["memory"]):
            yield "redis may hold more than its pod"


def _gangs(objects: Sequence[Object]) -> Iterator[str]:
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "JobSet":
            (job,) = spec["replicatedJobs"]
            inner, network = job["template"]["spec"], spec.get("network", {})
            if inner.get("backoffLimit") != 0 or inner["template"]["spec"].get("restartPolicy") != "Never":
                yield f"{name}: pods restart one by one"
            if not network.get("enableDNSHostnames"):
                yield f"{name}: its pods have no names"
            (container,) = inner["template"]["spec"]["containers"]
            args, variables = container["args"], {one["name"]: one for one in container["env"]}
            first = f"{name}-{job['name']}-0-0.{network.get('subdomain', name)}"
            if not {f"--master-addr={first}", "--master-port=29500", "--max-restarts=0"} <= set(args):
                yield f"{name}: ranks do not meet at {first}, or restart twice"
            if "job-completion-index" not in str(variables.get("PET_NODE_RANK")):
                yield f"{name}: nodes do not know their numbers"
            if f"--nnodes={inner['parallelism']}" not in args or inner["completions"] != inner["parallelism"]:
                yield f"{name}: the number of nodes differs"
            disrupted = [
                rule for rule in inner.get("podFailurePolicy", {}).get("rules", ()) if "DisruptionTarget" in str(rule)
            ]
            if [rule["action"] for rule in disrupted] != ["FailJob"] or not any(
                rule.get("onJobFailureReasons") == ["PodFailurePolicy"]
                and rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
                for rule in spec.get("failurePolicy", {}).get("rules", ())
            ):
                yield f"{name}: where one node is taken away the others are not started again, or it uses up restarts"
            for rule in inner.get("podFailurePolicy", {}).get("rules", ()):
                if any("status" not in condition for condition in rule.get("onPodConditions", ())):
                    yield f"{name}: a condition without status"
        restarts = spec.get("leaderWorkerTemplate", {}).get("restartPolicy")
        if one["kind"] == "LeaderWorkerSet" and restarts != "RecreateGroupOnPodRestart":
            yield f"{name}: a group with one restarted member hangs"


def _engines(objects: Sequence[Object]) -> Iterator[str]:
    """Each is listed in the settings or by the announcer, under the name that its kind gives it."""
    settings = [one["data"] for one in objects if one["kind"] == "ConfigMap" and "GSPO_ENGINE_URLS" in one["data"]]
    named = [url for data in settings for url in data["GSPO_ENGINE_URLS"].split(",") if url]
    announced = [
        url for name, _, pod in workloads(objects) if name == "announcer" for url in containers(pod)[0]["args"]
    ]
    if named and announced:
        yield "engines are named in the settings and announced: one that goes stays on the list"
    for name, owner, template in workloads(objects):
        if owner["kind"] not in ("StatefulSet", "LeaderWorkerSet") or name != "engine":
            continue
        scaled = [one["spec"] for one in objects if one["kind"] == "ScaledObject" and _scales(one, owner)]
        most = max([owner["spec"].get("replicas", 1), *(one["maxReplicaCount"] for one in scaled)])
        port = containers(template)[0]["ports"][0]["containerPort"]
        needed = {f"http://engine-{number}.engine:{port}" for number in range(most)}
        yield from (f"{url} is an engine that nobody lists" for url in sorted(needed - {*named, *announced}))
        if scaled and not announced:
            yield "engines are scaled and nobody announces them"


def _keys(objects: Sequence[Object]) -> Iterator[str]:
    """SGLang changes its weights for whoever asks, unless the file of its keys says otherwise. It reads none of
    ``--config=FILE``, which is one word."""
    for name, _, template in workloads(objects):
        for container in containers(template):
            mounted = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
            words = container.get("args", ())
            asks = ("--config", "/secrets/sglang.yaml") in pairwise(words) and "/secrets" in mounted
            if "sglang.launch_server" in container.get("command", ()) and not asks:
                yield f"{name} asks for no key"


def _scales(scaler: Object, owner: Object) -> bool:
    reference = scaler["spec"]["scaleTargetRef"]
    return (reference.get("kind"), reference["name"]) == (owner["kind"], owner["metadata"]["name"])


def scaling_behavior(scaler: Object) -> Object:
    """How fast a HorizontalPodAutoscaler, or the one that KEDA makes of a ScaledObject, changes the replicas."""
    spec = scaler["spec"]
    if scaler["kind"] == "ScaledObject":
        spec = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
    behavior: Object = spec.get("behavior", {})
    return behavior


def _scaling(one: Object, objects: Sequence[Object], metrics: set[str]) -> list[str]:
    if one["kind"] not in SCALERS:
        return []
    reference = one["spec"]["scaleTargetRef"]
    target = reference.get("kind", "Deployment"), reference["name"]
    behavior = scaling_behavior(one)
    if one["kind"] == "ScaledObject":
        used = set(re.findall(r"gspo_\w+", str(one["spec"]["triggers"])))
    else:
        used = {metric["external"]["metric"]["name"] for metric in one["spec"]["metrics"]}
    found = [f"{name} is no metric of ours" for name in used - metrics] or ([] if used else ["it scales by nothing"])
    if target not in {(other["kind"], other["metadata"]["name"]) for other in objects}:
        found.append(f"{target[0]} {target[1]}, which is to be scaled, does not exist")
    if not behavior.get("scaleDown", {}).get("policies"):
        found.append(f"{target[0]} {target[1]} is let go all at once")
    return found + (["scaled by the lag of a stream"] if "lagCount" in str(one) else [])
