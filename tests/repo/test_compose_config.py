"""What compose itself makes of docker-compose.yml: no GPU has two owners, and nothing that was told is ignored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".make" / "compose" / "usr" / "libexec" / "docker" / "cli-plugins" / "docker-compose"
WALL = "deploy/wall.yml"
OUTSIDE = "deploy/outside.yml"
GPU = ("--env-file", "deploy/gpu.env", "--profile", "gpu")


def found_compose() -> list[str] | None:
    """Unpacked by `make test-compose`, or the plugin of this machine's docker."""
    if UNPACKED.exists():
        return [str(UNPACKED)]
    docker = shutil.which("docker")
    if docker is None:
        return None
    asked = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
    return [docker, "compose"] if asked.returncode == 0 else None


COMPOSE = found_compose()
pytestmark = pytest.mark.skipif(COMPOSE is None, reason="run by `make test-compose`, which fetches compose")


def config(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    assert COMPOSE is not None
    return subprocess.run(
        [*COMPOSE, *options, "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def services(*options: str, **variables: str) -> dict[str, Any]:
    done = config(*options, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def owners(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A GPU and the container that may use it: all of these see all GPUs, and are told which are theirs."""
    for name, service in found.items():
        deploy = service.get("deploy", {})
        if deploy.get("resources", {}).get("reservations", {}).get("devices"):
            for number in range(deploy.get("replicas", 1)):
                for gpu in service["environment"]["CUDA_VISIBLE_DEVICES"].split(","):
                    yield gpu, f"{name}-{number + 1}"


@pytest.mark.parametrize(
    ("options", "variables", "gpus"),
    [
        ((), {}, 0),
        (("--profile", "observability"), {}, 0),
        (("--profile", "gpu"), {}, 2),
        (GPU, {}, 2),
        (GPU[:2], {}, 2),
        ((*GPU, "--profile", "observability"), {}, 2),
        (GPU, {"TRAINER_DEVICES": "0,1", "SGLANG_DEVICES": "2,3", "SGLANG_TP": "2"}, 4),
        (GPU, {"TRAINER_DEVICES": "0,1,2,3,4,5,6", "SGLANG_DEVICES": "7"}, 8),
    ],
)
def test_no_gpu_is_given_twice(options: tuple[str, ...], variables: dict[str, str], gpus: int) -> None:
    given = list(owners(services(*options, **variables)))
    assert len(given) == gpus
    assert len({gpu for gpu, _ in given}) == len(given), given


def test_the_trainer_has_a_process_for_each_of_its_gpus_and_the_engine_its_arguments() -> None:
    found = services(*GPU, TRAINER_DEVICES="0,1", SGLANG_ARGS="--mem-fraction-static 0.5", SGLANG_TP="2")
    assert "--nproc-per-node=gpu" in found["trainer-gpu"]["command"]
    assert found["sglang"]["command"][-4:] == ["--config", "/secrets/sglang.yaml", "--mem-fraction-static", "0.5"]
    assert "--tp=2" in found["sglang"]["command"]
    assert found["engine"]["deploy"]["replicas"] == found["trainer"]["deploy"]["replicas"] == 0


@pytest.mark.parametrize("options", [(), GPU])
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"TRAINER_GPUS": "2"}, "TRAINER_GPUS is no longer read, say TRAINER_DEVICES=0,1"),
        ({"SGLANG_GPUS": "1"}, "SGLANG_GPUS is no longer read, say SGLANG_DEVICES=1,2"),
        ({"CPU_REPLICAS": "2"}, "engine as container name must be unique"),
    ],
)
def test_what_earlier_releases_read_and_what_cannot_be_is_refused(
    options: tuple[str, ...], variables: dict[str, str], told: str
) -> None:
    done = config(*options, **variables)
    assert done.returncode != 0
    assert told in done.stderr


def test_counts_are_processes_and_settings_reach_those_that_read_them() -> None:
    found = services(ROLLOUT_REPLICAS="3", GATEWAY_REPLICAS="2", GSPO_ENV_TIER="process", GSPO_JUDGE_KEYS="a@b=c")
    assert [found[name]["deploy"]["replicas"] for name in ("rollout", "gateway")] == [3, 2]
    assert found["environments"]["environment"]["GSPO_ENV_TIER"] == "process"
    assert found["gateway"]["environment"]["GSPO_JUDGE_KEYS"] == "a@b=c"
    assert "GSPO_JUDGE_KEYS" not in found["environments"]["environment"]


@pytest.mark.parametrize(
    ("variables", "most", "bound_gib"),
    [({}, "1gb", 2), ({"REDIS_MAXMEMORY": "4gb", "REDIS_MEMORY": "8g"}, "4gb", 8)],
)
def test_redis_may_hold_half_of_what_its_container_may_use(
    variables: dict[str, str], most: str, bound_gib: int
) -> None:
    redis = services(**variables)["redis"]
    assert f"--maxmemory {most}" in redis["command"]
    assert int(redis["deploy"]["resources"]["limits"]["memory"]) == bound_gib * 2**30


def test_a_way_out_of_the_host_is_beside_the_networks_that_were_there() -> None:
    files = ("-f", "docker-compose.yml", "-f", OUTSIDE, *GPU)
    plain, opened = services(*GPU), services(*files, WANDB_API_KEY="k")
    changed = {name for name in plain if opened[name].get("networks") != plain[name].get("networks")}
    assert changed == {"gateway", "rollout", "trainer", "trainer-gpu"}
    for name in changed:
        assert opened[name]["networks"].keys() == {*plain[name]["networks"], "outside"}
    assert opened["trainer-gpu"]["environment"].items() > plain["trainer-gpu"]["environment"].items()
    assert services(*files)["trainer"]["environment"]["WANDB_API_KEY"] is None, "set to nothing, it would be a key"


def test_a_file_of_variables_holds_all_that_is_said_of_an_installation(tmp_path: Path) -> None:
    """As the page has it: files, extras and profiles beside the lines for GPUs, and no option but this one."""
    page, lines = (ROOT / "docs" / "operations.md").read_text(), (ROOT / "deploy" / "gpu.env").read_text()
    files, extras = f"COMPOSE_FILE=docker-compose.yml:{OUTSIDE}:{WALL}", 'IMAGE_EXTRAS="otel wandb"'
    assert f"`{files}`" in page
    assert f"`{extras}`" in page
    variables = tmp_path / "ours.env"
    variables.write_text(f"{lines}{files}\n{extras}\n")
    found = services("--env-file", str(variables))
    assert {"sglang", "trainer-gpu"} <= found.keys()
    assert found["trainer-gpu"]["build"]["args"]["EXTRAS"] == "otel wandb"
    assert "outside" in found["gateway"]["networks"]
    assert found["environments"]["environment"]["GSPO_ENV_TIER"] == "wall"


def test_graphs_stand_beside_gpus_where_both_profiles_are_named(tmp_path: Path) -> None:
    page, lines = (ROOT / "docs" / "operations.md").read_text(), (ROOT / "deploy" / "gpu.env").read_text()
    both = "COMPOSE_PROFILES=gpu,observability"
    variables = tmp_path / "ours.env"
    variables.write_text(lines.replace("COMPOSE_PROFILES=gpu\n", f"{both}\n"))
    assert f"`{both}`" in page
    assert "--profile gpu --profile observability up`" in page
    wanted = {"sglang", "trainer-gpu", "prometheus", "grafana"}
    assert wanted <= services("--env-file", str(variables)).keys()
    assert wanted <= services(*GPU, "--profile", "observability").keys()


def test_a_wall_inside_the_container_takes_nothing_else_from_its_hardening() -> None:
    plain, walled = (services(*files)["environments"] for files in ((), ("-f", "docker-compose.yml", "-f", WALL)))
    assert walled["environment"]["GSPO_ENV_TIER"] == "wall"
    assert set(plain["security_opt"]) == {"no-new-privileges:true"} < set(walled["security_opt"])
    for part in ("cap_drop", "read_only", "user", "networks"):
        assert walled[part] == plain[part]
