"""What ``gspo launch`` cannot do, or would do nothing with, is refused with the reason, in its plan too."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import pytest

from gspo_core.cli import main
from gspo_core.cli.command import CommandError
from services.launch import ports_option, slurm_run
from services.launch.installation import Ports
from services.launch.placement import PlacementRequest, place
from services.launch.topology import Site

ON_GPUS = ("--nodes", "2", "--gpus-per-node", "4", "--gpus", "trainer:0/0-3", "engines:1/0-3")


def launched(place: str, tmp_path: Path, *more: str) -> int:
    return main(["launch", place, "--data-dir", str(tmp_path / "data"), "--model", "m", "--plan", *more])


@pytest.mark.parametrize("place", ["ray", "slurm"])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--key", "mine"), "--key is the key of a job"),
        (("--job", "j.yaml", "--key", "l\u00e4uf"), "characters of ASCII, without blanks"),
        (("--job", "j.yaml", "--key", "two words"), "characters of ASCII, without blanks"),
        (("--job", "j.yaml", "--key", ""), "characters of ASCII, without blanks"),
        ((*ON_GPUS, "--trainer-nodes", "1"), "leave one of the two out"),
        ((*ON_GPUS, "--trainer-nodes", "2"), "leave one of the two out"),
        (("--trainer-nodes", "0"), "--trainer-nodes 0"),
        (("--cpus", "secrets=5"), "KIND one of api, engine, gateway, redis, rollout, trainer"),
        (("--memory", "environments=5G"), "KIND one of"),
        (("--memory", "trainer=64G", "trainer=1M"), "says twice what each trainer has: 64G and 1M"),
        (("--cpus", "engine=2", "--cpus", "engine=3"), "says twice what each engine has: 2 and 3"),
        (("--gpus-per-node", "8", "--engines", "2"), "engine-0 would have 2 GPUs"),
        (("--engine", "x {bad}"), "--engine has {bad}"),
        (("--engine", "x 'y"), "No closing quotation"),
        (("--sglang-python", "/bin/python"), "only --sglang starts it"),
    ],
)
def test_what_would_not_be_obeyed_is_refused_with_its_plan(
    place: str, more: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(place, tmp_path, *more) == 1
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""


def test_a_type_of_gpus_needs_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched("slurm", tmp_path, "--gpu-type", "h100") == 1
    assert "give --gpus-per-node" in capsys.readouterr().err
    assert launched("slurm", tmp_path, "--gpu-type", "h100", "--gpus-per-node", "2") == 0
    assert "#SBATCH --gres=gpu:h100:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("9", 540),
        ("9:30", 570),
        ("0:9:00", 540),
        ("00:04:00", 240),
        ("0-0", None),
        ("0", None),
        ("10", None),
        ("10:00", None),
        ("1:00:00", None),
        ("1-0", None),
        ("0-1:30", None),
        ("0-0:9", 540),
        ("0-0:9:50", 590),
        ("2-12:00:00", None),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_leaves_time_to_train(
    limit: str, seconds: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told to leave before its processes have started trains nothing, however often it is submitted."""
    assert launched("slurm", tmp_path, "--time", limit) == (0 if seconds is None else 1)
    said = capsys.readouterr()
    if seconds is None:
        assert f"#SBATCH --time={limit}" in said.out.splitlines()
    else:
        assert f"--time {limit} is {seconds} s, and 292 s before its end all are told to leave" in said.err
        assert "it takes 592 s (10 minutes)" in said.err


def test_an_option_given_again_adds_to_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    division = ("--gpus", "trainer:0-1", "--gpus", "engines:2-3", "--cpus", "engine=4", "--cpus", "trainer=3")
    assert launched("slurm", tmp_path, "--gpus-per-node", "4", *division) == 0
    assert "#SBATCH --cpus-per-task=18" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("model", "seen"), [("Qwen/Qwen3-8B", set()), ("m", set()), ("/models/m", {"/models"})])
def test_a_container_mounts_paths_and_no_names(model: str, seen: set[str]) -> None:
    given = argparse.Namespace(srun=["x=1"], container="image", data_dir="/data", model=model)
    *_, image, mounts = slurm_run._further(given)
    assert image == "--container-image=image"
    paths = {mount.split(":")[0] for mount in mounts.removeprefix("--container-mounts=").split(",")}
    assert paths - {os.getcwd(), sys.prefix} == {"/data", *seen}


def test_a_script_that_is_written_again_keeps_the_key_of_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second job in the same data directory would train the same again, beside the first."""
    output = tmp_path / "gspo.sbatch"

    def key(*more: str, data_dir: str = "a b's", job: str = "job.yaml") -> str:
        where = ("--data-dir", str(tmp_path / data_dir), "--job", str(tmp_path / job), "--output", str(output))
        assert main(["launch", "slurm", "--model", "m", *where, *more]) == 0
        [found] = re.findall(r"--key=(\S+)", output.read_text())
        return str(found)

    (tmp_path / "job.yaml").write_text("steps: 1")
    first = key()
    assert "keeps its key" not in capsys.readouterr().err
    assert key("--nodes", "2") == first
    assert "gspo.sbatch keeps its key, and so its job" in capsys.readouterr().err
    assert key("--key", "mine") == "mine"
    assert key() == "mine"
    others = [key(job="other.yaml"), key(data_dir="other"), key()]
    assert len({first, "mine", *others}) == 5
    (tmp_path / "job.yaml").write_text("steps: 2")
    assert key() not in others  # which would be refused as another job of that key
    output.write_bytes(b"\xff not a script of ours: '")
    assert key() not in others


@pytest.mark.parametrize("letter", [",", ":"])
def test_what_would_divide_mounts_is_refused(letter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"a{letter}b"
    folder.mkdir()
    assert launched("slurm", folder) == 0
    assert launched("slurm", folder, "--container", "image") == 1
    assert f"has a {letter!r}, which divides the paths" in capsys.readouterr().err


def test_a_plan_for_ray_does_not_ask_where_sglang_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert launched("ray", tmp_path, "--gpus-per-node", "8", "--engines", "2", "--sglang") == 0
    assert "engine-1         GPU 6,7" in capsys.readouterr().out
    assert launched("ray", tmp_path, "--sglang", "--sglang-python", "/of/the/cluster/python") == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("foo", "say 5 numbers"),
        ("1,2,3,4", "say 5 numbers"),
        ("1,2,3,4,-5", "say 5 numbers"),
        (f"1,2,3,4,{'9' * 5000}", "say 5 numbers"),
        ("0,2,3,4,9", "redis would have port 0"),
        ("1,2,3,4,65536", "ranks would have port 65536"),
        ("1,2,3,65534,9", "engine would have port 65536"),
        ("1,2,2,4,9", "api and gateway would both have port 2"),
        ("1,2,3,7,9", "engine and ranks would both have port 9"),
        ("1,2,3,9,8", "engine and ranks would both have port 9"),
        ("6,2,3,4,9", "redis and engine would both have port 6"),
    ],
)
def test_ports_that_cannot_be_had_are_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandError, match=told):
        ports_option.read(text, place(PlacementRequest(engines=3, trainers=2), Site.BATCH))
    assert launched("ray", tmp_path, "--engines", "3", "--trainers", "2", "--ports", text) == 1
    assert told in capsys.readouterr().err


def test_ports_may_stand_side_by_side() -> None:
    ports = ports_option.read("1,2,3,4,7", place(PlacementRequest(engines=3, trainers=2), Site.BATCH))
    assert ports == Ports(1, 2, 3, 4, 7)
