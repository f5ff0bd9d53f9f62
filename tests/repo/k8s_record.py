"""``make test-k8s``: runs the tests of the manifests, and writes what ran into ``benchmarks/results/k8s.md``: date,
commit, versions of what judged, counts.

It writes when all of them hold, in the place of the run before. The rest of the page stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.e2e.k8s_report import commit, put_into
from tests.repo.test_k8s import VERSIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "k8s.md"
TESTS = ROOT / "tests" / "repo" / "test_k8s.py"
PROCESSES = 2
HEADING = "## The last run of `make test-k8s`\n"


def counts(report: Path) -> dict[str, int]:
    """How tests ended, as pytest's report in XML has it."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = Counter[str]()
    for suite in suites:
        totals.update({name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")})
    ended = totals["skipped"] + totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - ended, "skipped": totals["skipped"]}


def judges(definitions: Path) -> dict[str, str]:
    """What the manifests were held to, with versions."""
    client = subprocess.run(
        ["kubectl", "version", "--client", "--output", "json"], capture_output=True, text=True, check=True
    ).stdout
    packages = sorted((definitions / "@kubernetes-models").glob("*/package.json"))
    models = {one["name"]: one["version"] for one in (json.loads(path.read_text()) for path in packages)}
    used = ("keda", "prometheus-operator", "gateway-api")
    return {
        "kubectl, which renders": json.loads(client)["clientVersion"]["gitVersion"],
        f"schemas of Kubernetes {' and '.join(VERSIONS)}": f"kubernetes-validate {version('kubernetes-validate')}",
        "JobSet": f"kubeflow-trainer-api {version('kubeflow-trainer-api')}",
        **{name: f"@kubernetes-models/{name} {models[f'@kubernetes-models/{name}']}" for name in used},
    }


def section(count: Mapping[str, int], held_to: Mapping[str, str], at: str, took_s: float, now: datetime) -> str:
    said = ", ".join(f"{count[outcome]} {outcome}" for outcome in ("passed", "skipped") if count.get(outcome))
    lines = [
        HEADING,
        f"{now.strftime('%d %B %Y, %H:%M UTC')}, commit {at}: {said}, in {took_s:.0f} s. No cluster: what `kubectl`",
        "renders is judged.\n",
        "| held to | by |",
        "|---|---|",
        *(f"| {what} | {by} |" for what, by in held_to.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    if shutil.which("kubectl") is None:
        print("kubectl is not there, which renders the manifests: install it first", file=sys.stderr)
        return 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(PROCESSES), f"--junitxml={report}", str(TESTS)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status == 0:
            took_s = time.monotonic() - began
            held_to = judges(Path(os.environ["GSPO_TEST_CRDS"]))
            put_into(PAGE, section(counts(report), held_to, commit(ROOT), took_s, datetime.now(UTC)))
            print(f"written to {PAGE.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
