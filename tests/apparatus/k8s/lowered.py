"""What an old and small cluster is given in place of our manifests: the same objects in versions that it serves.

Kubernetes 1.20, the latest that Debian's sources can build, lacks policy/v1, autoscaling/v2 and CronJobs of batch/v1,
and one node of two cores has less to reserve than ours ask for. Nothing else is changed, and every change is told:
``kubectl kustomize OVERLAY | python -m tests.apparatus.k8s.lowered | kubectl apply -f -``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

SERVED = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
    ("batch/v1", "CronJob"): "batch/v1beta1",
}
CPU = "50m"


def lowered(objects: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects to apply, and what was changed."""
    told: list[str] = []
    changed = [copy.deepcopy(one) for one in objects]
    for one in changed:
        name = f"{one['kind']} {one['metadata']['name']}"
        if (served := SERVED.get((one["apiVersion"], one["kind"]))) is not None:
            told.append(f"{name}: {one['apiVersion']} -> {served}")
            one["apiVersion"] = served
        if one["kind"] == "PodDisruptionBudget" and one["spec"].pop("unhealthyPodEvictionPolicy", None):
            told.append(f"{name}: without unhealthyPodEvictionPolicy (1.26)")
        for container in _containers(one):
            requests = container["resources"]["requests"]
            told.append(f"{name}: {container['name']} requests {CPU} of cpu, not {requests['cpu']}")
            requests["cpu"] = CPU
    return changed, told


def _containers(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = one.get("spec", {})
    if one["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    pod = spec.get("template", {}).get("spec", {})
    yield from pod.get("initContainers", ())
    yield from pod.get("containers", ())


def main() -> None:
    objects, told = lowered([one for one in yaml.safe_load_all(sys.stdin) if one])
    print(*told, sep="\n", file=sys.stderr)
    yaml.safe_dump_all(objects, sys.stdout)


if __name__ == "__main__":
    main()
