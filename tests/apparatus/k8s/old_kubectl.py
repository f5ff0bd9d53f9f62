"""`kubectl`, as it is typed, for a cluster that is too old for two of the things that are typed.

``apply -k`` applies what `lowered.py` makes of the overlay, and tells what that changed; ``create job --from=cronjob``
makes the job itself, since today's kubectl looks for CronJobs in a version that the cluster does not serve. All else is
given to the kubectl that ``REAL_KUBECTL`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from tests.apparatus.k8s.lowered import lowered


def rendered(kubectl: str, overlay: str) -> str:
    done = subprocess.run([kubectl, "kustomize", overlay], stdout=subprocess.PIPE, text=True, check=True)
    objects, told = lowered([one for one in yaml.safe_load_all(done.stdout) if one])
    print("changed for this cluster:", *told, sep="\n  ", file=sys.stderr)
    return yaml.safe_dump_all(objects)


def job_of(kubectl: str, namespace: str, cron_job: str, name: str) -> str:
    shown = subprocess.run(
        [kubectl, "--namespace", namespace, "get", "cronjob", cron_job, "--output", "json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    template: dict[str, Any] = json.loads(shown.stdout)["spec"]["jobTemplate"]
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": namespace}}
    return yaml.safe_dump(head | {"spec": template["spec"]})


def main(words: Sequence[str]) -> int:
    kubectl = os.environ["REAL_KUBECTL"]
    match words:
        case ["apply", "-k", overlay, *rest]:
            verb, given, left = "apply", rendered(kubectl, overlay), rest
        case ["-n", namespace, "create", "job", origin, name] if origin.startswith("--from=cronjob/"):
            verb, given, left = "create", job_of(kubectl, namespace, origin.removeprefix("--from=cronjob/"), name), []
        case _:
            os.execv(kubectl, [kubectl, *words])
    return subprocess.run([kubectl, verb, "--filename", "-", *left], input=given, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
