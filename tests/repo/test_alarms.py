"""Alarms fire for their reason, once, and not otherwise: judged by Prometheus itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCENES = Path(__file__).with_name("alarms.yml")
PROMTOOL = shutil.which("promtool", path=f"{ROOT / '.make' / 'prometheus' / 'usr' / 'bin'}") or shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="run by `make test-alarms`, which fetches promtool")


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@needs_promtool
def test_alarms_fire_for_their_reason() -> None:
    done = promtool("test", "rules", str(SCENES))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_an_autoscaler_is_told_of_more_engines_and_of_fewer() -> None:
    done = promtool("test", "rules", str(SCENES.with_name("engines_wanted.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_what_prometheus_reads_is_what_it_takes() -> None:
    done = promtool("check", "config", "deploy/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_graphs_ask_what_prometheus_understands(tmp_path: Path) -> None:
    board = yaml.safe_load((ROOT / "deploy" / "grafana" / "dashboards" / "gspo.json").read_text())
    asked = [target["expr"].replace("$job", ".+") for panel in board["panels"] for target in panel["targets"]]
    rules = [{"record": f"graph:{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "graphs", "rules": rules}]}))
    done = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
