"""Whatever the pages tell people to type is executed by a test, or checked as far as can be done, for a stated reason.

Blocks as `tests.repo.block_table` says; commands in prose by the parsers of the programs (`tests.repo.commands`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_core.environment_spec import HostSpec
from services.api.routes.trajectories import PushedTrajectories
from services.hosts.venv import requirements_of
from tests.repo.block_table import BLOCKS, Typed, held
from tests.repo.commands import CannotBeTyped, judge
from tests.repo.pages import (
    ROOT,
    SHELL,
    block,
    blocks,
    commands_in_prose,
    name,
    pages,
    simple_commands,
    spans,
    without_comments,
)

STAND_IN = """#!{python}
import json, os, pathlib, sys
name = pathlib.Path(sys.argv[0]).name
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
"""


def test_every_block_is_held_in_one_way() -> None:
    unheld = [f"{one} ({len(held(one))} lines of BLOCKS)" for one in blocks() if len(held(one)) != 1]
    assert unheld == []
    used = {(page, part) for page, part, _ in BLOCKS for one in blocks() if one.page == page and part in one.text}
    assert [line[:2] for line in BLOCKS if line[:2] not in used] == [], "these lines hold nothing any more"


@pytest.mark.parametrize("page", sorted({page for page, _, how in BLOCKS if isinstance(how, Typed)}))
def test_blocks_work_as_typed(page: str, tmp_path: Path) -> None:
    """One after the other, as they stand on the page."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "job.yaml").write_text(block("README.md", "ref: counter.py").text)
    for one in (one for one in blocks() if one.page == page):
        (how,) = held(one)
        if isinstance(how, Typed):
            calls = type_in(one.typed, tmp_path, how.foreign)
            assert {call[0] for call in calls} == set(how.foreign)
            for call in calls:
                judge(call, whole=True)
                assert_files(call, tmp_path)


def type_in(text: str, folder: Path, foreign: tuple[str, ...]) -> list[list[str]]:
    """What the foreign programs were asked."""
    beside = folder / ".stand-ins"
    beside.mkdir(exist_ok=True)
    for old in beside.iterdir():
        old.unlink()
    for program in foreign:
        (beside / program).write_text(STAND_IN.format(python=sys.executable))
        (beside / program).chmod(0o755)
    record = folder / ".calls"
    record.unlink(missing_ok=True)
    environment = os.environ | {
        "PATH": f"{beside}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CALLS": str(record),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    return [json.loads(line) for line in record.read_text().splitlines()]


def assert_files(call: list[str], folder: Path) -> None:
    """What another's program was given is there."""
    for word in call:
        if word.startswith("--from-file="):
            assert list((folder / word.partition("=")[2]).iterdir()), call
    if call[0] == "sbatch":
        subprocess.run(["bash", "-n", folder / call[1]], check=True)


def test_blocks_that_are_not_executed_could_be_typed() -> None:
    for one in blocks():
        if one.language in SHELL and not isinstance(held(one)[0], Typed):
            for words in simple_commands(without_comments(one.typed)):
                judge(words, whole=True)


@pytest.mark.parametrize("page", [page for page in pages() if commands_in_prose(page)], ids=name)
def test_commands_in_prose_could_be_typed(page: Path) -> None:
    refused = []
    for span in commands_in_prose(page):
        try:
            for words in simple_commands(span):
                judge(words, whole=False)
        except CannotBeTyped as error:
            refused.append(f"`{span}`: {error}")
    assert refused == []


# Of other people's programs.
FOREIGN_FLAGS = {
    "--mem-fraction-static", "--enable-deterministic-inference",  # SGLang
    "--replicas",  # kubectl
    "--maxmemory",  # Redis
    "--local-dir",  # hf
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts", "--standalone", "--rdzv-backend",
    "--shutdown-timeout",  # torchrun
    "--batch", "--signal", "--requeue",  # Slurm
    "--scale", "--wait", "--env-file", "--profile",  # docker compose
    "--for", "--from-file",  # kubectl
}  # fmt: skip


def test_flags_in_prose_exist() -> None:
    folders = ("gspo_core", "services", "examples", "benchmarks", "tests", "docs", "deploy")
    sources = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    known = set(re.findall(r'"(--[a-z][a-z0-9-]*)"', sources)) | FOREIGN_FLAGS
    for page in pages():
        if page.name == "CHANGELOG.md":
            continue
        named = {flag for span in spans(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)}
        assert named - known == set(), name(page)


def test_the_pushed_trajectory_is_one() -> None:
    (text,) = [one.text for one in blocks() if one.page == "docs/api.md" and one.language == "json"]
    (pushed,) = PushedTrajectories.model_validate_json(text).trajectories
    assert len(pushed.token_ids) == len(pushed.mask) == len(pushed.logprobs)


def test_what_an_author_may_say_of_hosts_is_so(tmp_path: Path) -> None:
    said: dict[str, dict[str, int]] = {}
    exec(block("docs/hosts.md", "hosting =").text, said)
    assert HostSpec.model_validate(said["hosting"]).memory_mb == 512
    (tmp_path / "world.py").write_text(block("docs/hosts.md", "# /// script").text)
    assert requirements_of(f"{tmp_path}/world.py:World") == ("gymnasium==1.4.0",)


@pytest.mark.parametrize(
    "wrong",
    [
        "make demos",
        "make demo DEMO_FLAG=1",
        "make demo DEMO_FLAGS='--sed 3'",
        "gspo submit job.yaml --watch-it",
        "gspo sumbit job.yaml",
        "python -m services.apis",
        "python -m services.rollout --max-episode 3",
        "docker compose restart redi",
        "docker compose --profile gpus up",
        "docker volume rm gspo_date",
        "docker images 'gpso-*'",
        "docker tag gspo-apis registry.lab/gspo-api",
        "docker push registry.lab:5000/gspo-trainr:0.2.0",
        "kubectl -n gspo get pods,pvcz",
        "kubectl -n gspo get networkpolicys",
        "cp -r k8s/overlays/devel k8s/overlays/lab",
        "kubectl -n gspos exec deploy/api -- python -m services.files.backup",
        "kubectl apply -k k8s/overlays/devel",
        "kubectl -n gspo exec deploy/apis -- python -m services.files.backup",
        "kubectl -n gspo scale statefulset engines --replicas=2",
        "kubectl -n gspo create job --from=cronjob/backups backup-1",
        "kubectl -n gspo rollout restart deployment/worker",
        "kubectl -n gspo wait --for-ever pod",
        "kubectl -n gspo exec trainr-0 -- gspo fsck",
        "kubectl -n gspo cp trainr-0:/data/jobs model",
        "kubectl -n gspo cp trainer-0 model",
        "docker compose cp trainr:/data/jobs model",
        "pip install -e '.[wandbs]'",
        "pip install gspo",
        ".venv/bin/pytest tests/cores",
        "torchrun --nproc-per-node 2 -m services.trainer --grace 90",
        "GSPO_PROT=1 docker compose up",
        "sl",
    ],
)
def test_what_cannot_be_typed_is_noticed(wrong: str) -> None:
    (words,) = simple_commands(wrong)
    with pytest.raises((CannotBeTyped, SystemExit)):
        judge(words, whole=True)
