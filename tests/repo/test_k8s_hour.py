"""What types an operator's first hour, without a cluster: `tests/e2e/k8s_hour.py` and the kubectl that it types on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gspo_core import __version__
from tests.e2e.compose_check import CheckFailed, Said
from tests.e2e.k8s_hour import (
    COPIES,
    FAILS,
    HEADING,
    OVERLAY,
    Shell,
    commands,
    furnish,
    of_the_hour,
    section,
    write_overlay,
)
from tests.repo.pages import ROOT, Block

OVERLAYS = sorted({path.name for path in (ROOT / "k8s" / "overlays").iterdir()} - {OVERLAY.parent.name})
IMAGES = ("api", "rollout", "gateway", "trainer", "engine", "environments")
# A kubectl that renders one budget, knows one CronJob, and says what else it is asked and given.
FAKE = """#!/bin/bash
case "$*" in
  kustomize*) echo '{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: api}, spec: {}}' ;;
  *'get cronjob'*) echo '{"spec": {"jobTemplate": {"spec": {"backoffLimit": 2}}}}' ;;
  *) echo "asked $*"; [ "$2" != --filename ] || cat ;;
esac
"""


def ask(folder: Path, *words: str) -> str:
    fake = folder / "kubectl"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "tests.apparatus.k8s.old_kubectl", *words],
        cwd=ROOT,
        env=os.environ | {"REAL_KUBECTL": str(fake)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_an_overlay_is_applied_as_the_cluster_serves_it(tmp_path: Path) -> None:
    asked, _, given = ask(tmp_path, "apply", "-k", "overlays/dev", "-l", "part=data").partition("\n")
    assert asked == "asked apply --filename - -l part=data"
    assert yaml.safe_load(given)["apiVersion"] == "policy/v1beta1"


def test_a_job_is_made_of_a_cron_job_that_kubectl_cannot_read(tmp_path: Path) -> None:
    words = ("-n", "gspo", "create", "job", "--from=cronjob/backup", "backup-1")
    asked, _, given = ask(tmp_path, *words).partition("\n")
    assert asked == "asked create --filename -"
    made = yaml.safe_load(given)
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("batch/v1", "Job", "backup-1")
    assert made["spec"] == {"backoffLimit": 2}


def test_all_else_is_kubectl_s_own(tmp_path: Path) -> None:
    assert ask(tmp_path, "-n", "gspo", "delete", "job", "--all") == "asked -n gspo delete job --all\n"


def test_every_line_of_the_hour_is_typed_and_loops_whole() -> None:
    typed = [command for one in of_the_hour() for command in commands(one)]
    loops = [one for one in typed if one.startswith("for ")]
    assert len(loops) == 2
    assert all(one.endswith("done") for one in loops)
    assert sum(FAILS in one for one in typed) == 1
    for begins in ("kubectl apply -k", "gspo submit", "kubectl -n gspo create job --from=cronjob/restore"):
        assert any(one.startswith(begins) for one in typed), begins


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlay and is not here")
def test_the_overlay_of_the_page_renders_with_its_components_from_its_registry(tmp_path: Path) -> None:
    furnish(tmp_path)
    assert any(COPIES in one.text for one in of_the_hour())
    subprocess.run(["bash", "-c", COPIES], cwd=tmp_path, check=True)
    write_overlay(tmp_path / OVERLAY)
    text = rendered(tmp_path)
    named = {(one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all(text)}
    assert {("CronJob", "backup"), ("CronJob", "restore"), ("Deployment", "announcer")} <= named
    assert our_images(text) == {f"registry.lab/gspo-{name}:{__version__}" for name in IMAGES}


def rendered(folder: Path) -> str:
    shown = ["kubectl", "kustomize", str((folder / OVERLAY).parent)]
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def our_images(text: str) -> set[str]:
    return {line.partition("image: ")[2] for line in text.splitlines() if "image: " in line and "gspo" in line}


def overlay_with(folder: Path, overlay: str, images: list[dict[str, str]], how: str) -> str:
    """One of an operator's own, rendered: a copy of ``overlay`` with more images, or one that builds upon it."""
    furnish(folder)
    given = {"namespace": "gspo", "resources": [f"../{overlay}"]}
    if how == "copied":
        shutil.copytree(folder / "k8s" / "overlays" / overlay, (folder / OVERLAY).parent)
        given = yaml.safe_load((folder / OVERLAY).read_text())
    (folder / OVERLAY).parent.mkdir(exist_ok=True)
    (folder / OVERLAY).write_text(yaml.safe_dump(given | {"images": [*given.get("images", []), *images]}))
    return rendered(folder)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlay and is not here")
@pytest.mark.parametrize("how", ["copied", "built upon"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_images_of_the_page_lead_every_overlay_to_its_registry(tmp_path: Path, overlay: str, how: str) -> None:
    (named,) = of_the_hour("yaml")
    text = overlay_with(tmp_path, overlay, yaml.safe_load(named.text)["images"], how)
    ours = {name for name in IMAGES if name != "engine"} if "nvidia.com/gpu" in text else set(IMAGES)
    trainers = {"trainer-cuda"} if "nvidia.com/gpu" in text else {"trainer"}
    assert our_images(text) == {f"registry.lab/gspo-{name}:{__version__}" for name in ours - {"trainer"} | trainers}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlay and is not here")
@pytest.mark.parametrize(("name", "tag"), [("gspo-trainer", __version__), ("gspo-trainer-cuda", "mine")])
def test_the_trainer_with_a_gpu_has_the_image_of_one_name_alone(tmp_path: Path, name: str, tag: str) -> None:
    """As the page says it: kustomize looks for the name that the overlay below has given, and passes over any other."""
    text = overlay_with(tmp_path, "two-gpus", [{"name": name, "newTag": "mine"}], "built upon")
    assert {one for one in our_images(text) if "trainer" in one} == {f"gspo-trainer-cuda:{tag}"}


def test_a_command_that_a_block_breaks_off_is_noticed() -> None:
    with pytest.raises(CheckFailed, match="ends within a command"):
        list(commands(Block("docs/operations.md", 1, "sh", "true\nfor one in a b; do\n")))


@pytest.mark.parametrize("command", ["false", f"true  {FAILS}"])
def test_a_line_that_ends_as_it_must_not_is_noticed(tmp_path: Path, command: str) -> None:
    with pytest.raises(CheckFailed, match="it ended with"):
        Shell(tmp_path).type(command)


def test_a_line_that_fails_by_no_policy_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"(?s)otherwise than by a policy: .*no-such-command"):
        Shell(tmp_path).type(f"no-such-command  {FAILS}")


def test_what_is_exported_is_there_for_what_is_typed_next(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.type("export KEY=$(echo one)")
    shell.type('[ "$KEY" = one ]')
    shell.type(f"echo 'gaierror: name resolution' >&2; false  {FAILS}")
    assert json.dumps([one.text for one in shell.said]).count("KEY") == 2


def test_the_page_has_a_row_for_each_command() -> None:
    loop, noted = "for one in a; do\n  echo $one | wc\ndone", f"false  {FAILS}"
    said = [Said(61.2, 7.6, loop), Said(1, 1, noted), Said(2, 1, "and until all is ready")]
    text = section(said, "abc1", datetime(2026, 11, 23, 4, 5, tzinfo=UTC))
    assert text.startswith(HEADING)
    assert "| 61 | 8 | `for one in a; do echo $one \\| wc done` |\n| 1 | 1 | `false` fails, as it has to |\n" in text
    assert "| 2 | 1 | and until all is ready |\n" in text
    assert "commit abc1; 1 minutes in all" in text
