"""An operator's first hour, typed: `python -m tests.e2e.k8s_hour`, with KUBECONFIG set, as root.

Every command of "On a cluster" in `docs/operations.md`, in its order and as it stands there, but for the first block:
the node has the images, so none is built or pushed, and the overlay names no registry. It differs in this, too:
`kubectl` is `tests/apparatus/k8s/old_kubectl.py`; volumes are made again by hand after their claims were deleted; the
job is the demo's, and the shell that the page wants beside `kubectl port-forward` begins when the port is open. What
was typed and how long it took becomes a section of `benchmarks/results/k8s.md`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import yaml

from gspo_core.client import Client
from tests.e2e import k8s_report
from tests.e2e.compose_check import MODEL, ROOT, CheckFailed, Run, Said, wait
from tests.e2e.k8s_check import ORDER, REPORT, asked, new_volumes, pods, rolled_out
from tests.repo.pages import Block, blocks, without_comments

PAGE = "docs/operations.md"
HEADING = "## The last run of `make real-k8s-hour`\n"
FAILS = "# has to fail"
REFUSALS = ("name resolution", "timed out")
"""How a pod fails that may neither ask for names nor reach others; where no policy is enforced, nothing fails."""
PORT = 8000
BUILDS = "docker compose build"
COPIES = "cp -r k8s/overlays/dev k8s/overlays/lab"
OVERLAY = Path("k8s/overlays/lab/kustomization.yaml")
STEPS, STEPS_AGAIN = 12, 2


def of_the_hour(language: str = "sh") -> list[Block]:
    """Blocks between the heading and the next one."""
    lines = (ROOT / PAGE).read_text().splitlines()
    first = lines.index("## On a cluster")
    last = next(number for number, line in enumerate(lines) if number > first and line.startswith("##"))
    return [one for one in blocks() if one.page == PAGE and first < one.line <= last and one.language == language]


def commands(one: Block) -> Iterator[str]:
    """One after the other; a loop is typed whole."""
    typed = ""
    for line in one.text.splitlines():
        typed += f"{line}\n"
        if subprocess.run(["bash", "-n"], input=typed, text=True, capture_output=True, check=False).returncode == 0:
            if without_comments(typed).strip():
                yield typed.strip()
            typed = ""
    if typed:
        raise CheckFailed(f"{one} ends within a command: {typed}")


class Shell:
    """A folder in which is typed, and what was."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Said] = []
        self.folder = folder
        self._exports = ""
        programs = folder / "programs"
        programs.mkdir()
        (programs / "kubectl").write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.apparatus.k8s.old_kubectl "$@"\n'
        )
        (programs / "kubectl").chmod(0o755)
        self.environment = os.environ | {
            "REAL_KUBECTL": shutil.which("kubectl") or "kubectl",
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def type(self, command: str) -> None:
        """Until it ends, as the page says it does."""
        print(f"$ {command}", flush=True)
        if command.startswith("export "):
            self._exports += f"{command}\n"
        has_to_fail = FAILS in command
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{self._exports}{command}"],
            cwd=self.folder,
            env=self.environment,
            stderr=subprocess.PIPE if has_to_fail else None,
            text=True,
            check=False,
        )
        if (done.returncode != 0) != has_to_fail:
            raise CheckFailed(f"it ended with {done.returncode}: {command}")
        if has_to_fail and not any(one in done.stderr for one in REFUSALS):
            raise CheckFailed(f"it failed otherwise than by a policy: {done.stderr[-1000:]}")
        self.note(command, started)

    def note(self, what: str, started: float) -> None:
        self.said.append(Said(time.monotonic() - started, os.getloadavg()[0], what))

    @contextmanager
    def beside(self, command: str) -> Iterator[None]:
        """Another shell, until the port answers and for as long as this one needs it."""
        if _is_open():
            raise CheckFailed(f"something else listens on port {PORT}")
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment)
        try:
            wait("the port", _is_open, 60)
            yield
        finally:
            process.terminate()
            process.wait()


def _is_open() -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", PORT)) == 0


def furnish(folder: Path) -> None:
    """A checkout's manifests, and a job."""
    shutil.copytree(ROOT / "k8s", folder / "k8s", ignore=shutil.ignore_patterns(OVERLAY.parent.name))
    job = yaml.safe_load((ROOT / "examples" / "demo" / "job.yaml").read_text())
    job |= {"model": MODEL, "steps": STEPS, "evaluation": {"tasks": 64, "every": STEPS}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def write_overlay(file: Path, keys: Sequence[str] = ("components", "images")) -> None:
    """What the page names in the copy of an overlay."""
    (named,) = of_the_hour("yaml")
    given = yaml.safe_load(named.text)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {key: given[key] for key in keys}))


def type_page(shell: Shell) -> None:
    for one in of_the_hour():
        for command in commands(one) if BUILDS not in one.text else ():
            if command.startswith("gspo submit"):
                with shell.beside(f"kubectl -n gspo port-forward service/api {PORT}"):
                    shell.type(command)
            else:
                shell.type(command)
            if command == COPIES:
                write_overlay(shell.folder / OVERLAY, ["components"])
            if " delete pvc " in command:
                new_volumes()


def try_what_came_back(shell: Shell) -> None:
    """Everything is ready, the job that was submitted before is known as it ended, and another one is trained."""
    started = time.monotonic()
    for name in ORDER:
        rolled_out(name)
        if not pods(name):
            raise CheckFailed(f"there is no pod of {name}")
    shell.note("and until all is ready", started)
    address = asked("get", "service", "api")["spec"]["clusterIP"]
    with Client(f"http://{address}:{PORT}", (shell.folder / "secrets/api/gspo_api_keys").read_text()) as client:
        known = [(job["status"], job["step"]) for job in client.jobs()]
        if known != [("succeeded", STEPS)]:
            raise CheckFailed(f"after the restore the jobs are {known}")
        started = time.monotonic()
        Run(client, 1, STEPS_AGAIN).reaches(STEPS_AGAIN)
    shell.note(
        f"and until another job of {STEPS_AGAIN} steps is trained; the one from before is known as it ended", started
    )


def _cell(text: str) -> str:
    """As code without its comment, unless it was not typed."""
    shown = " ".join(without_comments(text).split()).replace("|", "\\|")
    return shown if text.startswith("and ") else f"`{shown}`{' fails, as it has to' if FAILS in text else ''}"


def section(said: list[Said], at: str, now: datetime) -> str:
    minutes = sum(one.after_s for one in said) / 60
    lines = [
        HEADING,
        "Each command of [operations.md](../../docs/operations.md#on-a-cluster) as it stands there, but for images,",
        f"which the node had. Ended {now:%d %B %Y, %H:%M UTC}, commit {at}; {minutes:.0f} minutes in all.",
        "`kubectl` lowered what this cluster does not serve (`tests/apparatus/k8s/old_kubectl.py`); volumes were made",
        "by hand where their claims were deleted. Load is of the last minute.\n",
        "| seconds | load | typed |",
        "|---|---|---|",
        *(f"| {one.after_s:.0f} | {one.load:.0f} | {_cell(one.text)} |" for one in said),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.e2e.k8s_hour", description=__doc__).parse_args()
    at = k8s_report.commit(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        furnish(folder)
        shell = Shell(folder)
        try:
            type_page(shell)
            try_what_came_back(shell)
        except CheckFailed as error:
            print(f"k8s_hour: {error}", file=sys.stderr)
            subprocess.run(["kubectl", "-n", "gspo", "get", "pods", "--output=wide"], check=False)
            return 1
    k8s_report.put_into(REPORT, section(shell.said, at, datetime.now(UTC)))
    print(f"written into {REPORT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
