"""What docs/operations.md says of settings, alarms and services is what the code, the alarms and compose say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from services.process.settings import PREFIX, Settings
from tests.repo.manifest_policy import PRIVATE, RUNS_TO_ITS_END, workloads

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def metrics() -> set[str]:
    """The names of all series that the API exports."""
    text = "".join(path.read_text() for path in (ROOT / "services" / "api").rglob("*.py"))
    names = set(re.findall(r'"(gspo_\w+)"', text))
    from services.api.routes.telemetry import SHOWN

    names |= {f"gspo_job_{name.replace('/', '_')}" for name in SHOWN}
    return names | {f"{name}_total" for name in names} | {f"{name}_bucket" for name in names}


def test_every_alarm_is_explained_and_asks_for_metrics_that_exist() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    alarms = [rule for group in groups for rule in group["rules"]]
    explained = re.findall(r"^\| `(Gspo\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(explained) == sorted(rule["alert"] for rule in alarms)
    for rule in alarms:
        assert set(re.findall(r"gspo_\w+", rule["expr"])) <= metrics(), rule["alert"]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "gspo.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) >= 12
    for expression in asked:
        assert set(re.findall(r"gspo_\w+", expression)) <= metrics(), expression
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_compose_sets_only_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name, service in COMPOSE["services"].items():
        given = {variable for variable in service.get("environment", {}) if variable.startswith(PREFIX)}
        assert given <= known, name


def test_what_this_page_tells_to_set_reaches_the_processes_of_compose() -> None:
    before_settings = PAGE[: PAGE.index("## Settings")]
    passed = (ROOT / "docker-compose.yml").read_text() + (ROOT / "deploy" / "gpu.env").read_text()
    told = set(re.findall(r"`(?:[A-Z_=0-9]+ )*([A-Z]+_[A-Z_]+)(?:=[^`]*)?`", before_settings))
    assert {"GSPO_REDIS_BYTES_PER_JOB", "GSPO_MODELS", "REDIS_MAXMEMORY", "REDIS_MEMORY"} <= told
    elsewhere = {
        "AWS_ACCESS_KEY_ID",
        "AWS_ENDPOINT_URL",
        "GSPO_SECRETS_DIR",
        "GSPO_API_KEY",
        "COMPOSE_VERIFIER",
        "COMPOSE_CHECK_FLAGS",
        "COMPOSE_FILE",
        "COMPOSE_PROFILES",
        "WANDB_API_KEY",
    }
    refused = {name for name in told if f"${{{name}:+" in passed}
    assert refused == {"TRAINER_GPUS", "SGLANG_GPUS"}
    elsewhere |= refused
    assert [name for name in sorted(told - elsewhere) if f"${{{name}:-" not in passed] == []


def test_who_is_given_time_to_leave_takes_it_and_no_more() -> None:
    """Seconds that a process may drain, and those after which it is killed. A worker's last words need Redis."""
    drains = {"api": "--grace-s", "rollout": "--drain-s", "trainer": "--grace-s", "trainer-gpu": "--grace-s"}
    for name, argument in drains.items():
        service = COMPOSE["services"][name]
        drain_s = float(service["command"][service["command"].index(argument) + 1])
        after_s = 20 if name == "rollout" else 10
        assert drain_s + after_s == float(service["stop_grace_period"].removesuffix("s")), name


def networks(service: str) -> set[str]:
    return set(COMPOSE["services"][service].get("networks", ()))


def test_the_networks_of_compose_are_the_wall() -> None:
    """Environments share a network with who plays episodes alone, and none that leads out."""
    others = set(COMPOSE["services"]) - {"environments", "gateway", "rollout"}
    assert networks("environments") == {"worlds"}
    assert COMPOSE["networks"]["worlds"] == {"internal": True}
    assert all("worlds" not in networks(service) for service in others)
    volumes = str(COMPOSE["services"]["environments"]["volumes"])
    assert "secrets-environments:" in volumes
    assert "data:" not in volumes
    assert not any(f"secrets-{role}:" in volumes for role in ("api", "trainer", "rollout", "gateway"))


def test_every_container_of_ours_is_hardened_and_bounded() -> None:
    for name, service in COMPOSE["services"].items():
        if name == "sglang":  # somebody else's image, which has not been tried so
            continue
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["user"].split(":")[0] != "0", name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name not in ("secrets", "trainer-gpu"):
            assert {"memory", "pids"} <= service["deploy"]["resources"]["limits"].keys(), name
    published: dict[str, Any] = {name: service.get("ports", []) for name, service in COMPOSE["services"].items()}
    assert {name for name, ports in published.items() if ports} == {"api", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    redis = " ".join(COMPOSE["services"]["redis"]["command"])
    for wanted in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "--aclfile"):
        assert wanted in redis


def test_redis_reads_what_a_new_release_permits_its_users() -> None:
    """At its start alone: a worker of the new release is refused its functions by one that goes on."""
    upgrade = PAGE[PAGE.index("## Upgrade") : PAGE.index("## Rolling restart")]
    one_host = ("docker compose run --rm -T secrets", "docker compose restart redis", "docker compose up -d --wait\n")
    cluster = ("first_secrets secrets", "create secret generic gspo-$role", "rollout restart statefulset/redis")
    for said in (one_host, cluster):
        assert sorted(said, key=upgrade.index) == list(said)


def test_no_upgrade_stops_redis_before_those_that_hand_back_to_it() -> None:
    """Compose stops what is to be started again (``restart``) before it replaces anything."""
    needs = [service["depends_on"] for service in COMPOSE["services"].values() if "depends_on" in service]
    assert not any(one.get("restart") for need in needs if isinstance(need, dict) for one in need.values())


def test_nothing_is_scaled_up_while_a_backup_is_brought_back() -> None:
    """KEDA holds its least number of replicas also where somebody scaled to none."""
    restore = PAGE[PAGE.index("**Data or Redis are gone**") : PAGE.index("### What it took")]
    assert restore.index("delete scaledobject --all") < restore.index("scale --replicas=0")


def test_a_backup_is_brought_back_where_nothing_runs_any_more() -> None:
    """Whatever makes pods of ours is scaled to none or deleted before, and its pods are awaited."""
    restore = PAGE[PAGE.index("**Data or Redis are gone**") : PAGE.index("### What it took")]
    found = [
        (one["kind"], name, template["metadata"]["labels"]["app.kubernetes.io/name"])
        for path in (ROOT / "k8s").rglob("*.yaml")
        for name, one, template in workloads([one for one in yaml.safe_load_all(path.read_text()) if "spec" in one])
    ]
    awaited = {
        one for some in re.findall(r"wait --for=delete pod .* in \((.*)\)'", restore) for one in some.split(", ")
    }
    assert awaited == {label for kind, _, label in found if kind not in RUNS_TO_ITS_END}
    ended = re.findall(r"(?:scale --replicas=0|delete) (statefulset|leaderworkerset|jobset) ([a-z ]+)", restore)
    stopped = {(kind, name) for kind, names in ended for name in names.split()}
    scaled = {"StatefulSet", "LeaderWorkerSet", "JobSet"}
    assert stopped == {(kind.lower(), name.split()[0]) for kind, name, _ in found if kind in scaled}


def test_the_variables_for_gpus_need_no_option_beside_them() -> None:
    """So they can stand in `.env`, and every command of the page means the same containers."""
    given = (ROOT / "deploy" / "gpu.env").read_text().splitlines()
    (profile,) = {one for service in ("sglang", "trainer-gpu") for one in COMPOSE["services"][service]["profiles"]}
    assert f"COMPOSE_PROFILES={profile}" in given


def test_who_asks_somebody_outside_may_be_given_a_way_out_and_environments_are_not() -> None:
    outside = yaml.safe_load((ROOT / "deploy" / "outside.yml").read_text())
    assert outside["networks"] == {"outside": {}}
    assert outside["services"].keys() == {"gateway", "rollout", "trainer", "trainer-gpu"}
    assert all(service["networks"] == ["outside"] for service in outside["services"].values())


def test_the_rules_of_that_way_out_close_private_addresses_but_its_own() -> None:
    """The lines at the head of the file, typed; each rule goes before those that are there."""
    text = (ROOT / "deploy" / "outside.yml").read_text()
    typed = "\n".join(re.findall(r"^#   (.*)$", text, re.MULTILINE))
    stubs = 'docker() { echo 172.30.0.0/16; }; iptables() { echo "$*"; }\n'
    done = subprocess.run(["bash", "-euc", stubs + typed], capture_output=True, text=True, check=True)
    rules = [line.split() for line in reversed(done.stdout.splitlines())]
    assert {tuple(rule[:4]) for rule in rules} == {
        ("-I", "INPUT", "-s", "172.30.0.0/16"),
        ("-I", "DOCKER-USER", "-s", "172.30.0.0/16"),
    }
    forwarded = [(rule[5], rule[-1]) for rule in rules if rule[1] == "DOCKER-USER"]
    assert forwarded[0] == ("172.30.0.0/16", "RETURN")
    assert {address for address, verdict in forwarded if verdict == "REJECT"} == PRIVATE
    assert "head of that file" in (ROOT / "docs" / "security.md").read_text()


def test_every_image_is_built_with_the_extras_that_are_asked_for() -> None:
    """All with the same, so that they share the layer."""
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    (light,) = re.findall(r"^FROM \S+ AS light\n(.*?)^FROM ", dockerfile, re.MULTILINE | re.DOTALL)
    assert "ARG EXTRAS=\nRUN for extra in $EXTRAS; do" in light
    assert '-r "$extra.txt" || exit 1' in light
    built = {name: service["build"] for name, service in COMPOSE["services"].items() if "build" in service}
    assert {name for name, build in built.items() if build["args"] != {"EXTRAS": "${IMAGE_EXTRAS:-}"}} == set()


def test_nobody_waits_for_a_pod_that_ends_or_applies_over_a_job() -> None:
    """Pods of jobs are never ready again once they have ended, and what a Job runs cannot be changed."""
    jobs = {"backup", "model-loader"}
    waited = re.findall(r"wait --for=condition=Ready pod (.*) --timeout", PAGE)
    assert waited
    for selector in waited:
        assert set(re.findall(r"notin \((.*)\)", selector)[0].split(", ")) == jobs
    upgrade = PAGE[PAGE.index("## Upgrade") : PAGE.index("## Rolling restart")]
    assert "`kubectl -n gspo delete job model-loader`" in upgrade


def test_images_are_named_as_they_must_be() -> None:
    dockerfile = (ROOT / "services" / "Dockerfile").read_text()
    bases = set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    assert bases - stages == {"python:3.11-slim"}
    assert not re.search(r"^#\s*syntax", dockerfile, re.MULTILINE)
    assert "sha256:" not in dockerfile
    assert COMPOSE["services"]["redis"]["image"] == "redis:7-alpine"
    assert "ulimits" not in (ROOT / "docker-compose.yml").read_text()
