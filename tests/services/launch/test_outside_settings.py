"""Variables of the shell that a stack on Slurm or Ray would not obey are refused by name, wherever it begins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from gspo_core.cli import main
from services.launch import outside_settings, slurm_run
from services.process.settings import Settings


def begun(place: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    where = ["--data-dir", str(data_dir), "--model", "m"]
    if place != "allocation":
        return main(["launch", place, *where])
    monkeypatch.setattr(sys, "argv", ["slurm_run", *where, "--ports", "1,2,3,4,5"])
    monkeypatch.setattr(slurm_run, "node_names", lambda: ["n0"])
    monkeypatch.setattr(slurm_run, "addresses", lambda nodes: ["127.0.0.1"])
    monkeypatch.setattr(slurm_run, "run", lambda installation, steps, submission: 0)
    return slurm_run.main()


@pytest.mark.parametrize("place", ["slurm", "ray", "allocation"])
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GSPO_REDIS_URL", "redis://other:6379", "the stack starts a Redis of its own: unset it"),
        ("gspo_redis_url", "redis://other:6379", "the stack starts a Redis of its own: unset it"),
        ("GSPO_API_KEYS", "mine", "the stack makes its own secrets"),
        ("GSPO_ENGINE_KEYS", '["k"]', "the stack makes its own secrets"),
        ("GSPO_SECRETS_DIR", "/secrets", "the stack makes its own secrets"),
        ("GSPO_ENGINE_URLS", "http://h:1", "the stack starts its own engines"),
        ("GSPO_HEALTH_FILE", "/h", "that is for one process"),
        ("GSPO_API_HOST", "h", "where its API listens"),
        ("GSPO_API_PORT", "1", "ports are moved with --ports"),
        ("GSPO_GATEWAY_BIND", "h:1", "where its gateway listens"),
        ("GSPO_GATEWAY_URL", "http://h:1", "where its gateway is"),
        ("GSPO_DATA_DIR", "/elsewhere", "--data-dir says where that is"),
        ("GSPO_ENGIN_URLS", "http://h:1", "did you mean GSPO_ENGINE_URLS?"),
        ("GSPO_LEASE_S", "-1", "greater than 0"),
    ],
)
def test_what_the_stack_decides_is_refused(
    place: str,
    name: str,
    value: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    assert begun(place, tmp_path / "data", monkeypatch) == 1
    said = capsys.readouterr()
    assert name in said.err
    assert told in said.err
    assert said.out == ""
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("place", ["slurm", "ray", "allocation"])
def test_other_settings_pass_through(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "ray":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    more = {"GSPO_LOG_LEVEL": "debug", "GSPO_LEASE_S": "60", "GSPO_REDIS_URL": "", "GSPO_OTHERS": "x"}
    for name, value in {**more, "GSPO_DATA_DIR": str(tmp_path / "link")}.items():
        monkeypatch.setenv(name, value)
    status = begun(place, tmp_path / "data", monkeypatch)
    if place == "ray":
        assert "Ray is not installed" in capsys.readouterr().err
    else:
        assert status == 0


def test_what_is_decided_are_settings() -> None:
    assert set(outside_settings.DECIDED) <= set(Settings.model_fields)
    assert outside_settings.is_decided("GSPO_REDIS_URL")
    assert not any(map(outside_settings.is_decided, ("GSPO_LOG_LEVEL", "REDIS_URL", "GSPO_")))
