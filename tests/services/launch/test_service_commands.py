"""Commands that the service registers, with the service at hand and without it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gspo_core.cli import main, service
from services.launch import checks, commands

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["services_that_are_not_there.local.commands", "json.local.commands"])
def no_service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second: a package of that name is there, and it is somebody else's."""
    monkeypatch.setattr(service, "REGISTRY", request.param)


@pytest.mark.parametrize(
    "typed", ["up", "up --port 0", "launch slurm --model m", "env serve a:B --port 1", "up --help"]
)
@pytest.mark.usefixtures("no_service")
def test_without_the_service_its_commands_say_so(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 1
    said = capsys.readouterr().err
    assert "only the library is installed" in said
    assert "Install gspo-service of the same version" in said
    assert f"`gspo {' '.join(typed.split()[: 2 if typed.startswith('env') else 1])}`" in said


@pytest.mark.usefixtures("no_service")
def test_without_the_service_the_doctor_examines_the_client_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["✓", "python"], ["·", "services"], ["·", "api"]]
    assert "not installed" in lines[1]


def test_the_doctor_makes_the_checks_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--url", "http://127.0.0.1:9"])
    subjects = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:1] in "✓·✗" and line]
    machine = ["cores", "gpu", "kernel", "account", "wall", "ports"]
    services = ["settings", "services", "training", "sglang", "vllm"]
    assert subjects == ["python", *machine, *services, "redis", "data", "engines", "api"]


def test_the_library_names_the_commands_that_it_lacks_as_the_service_registers_them() -> None:
    assert {one.name for one in commands.COMMANDS} == service.ABSENT.keys()
    for one in commands.COMMANDS:
        module = import_module(one.module)
        assert callable(module.add_options)
        assert callable(module.run)
    assert import_module(commands.CHECKS) is checks


def test_a_package_that_the_service_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = service.ServiceCommand("up", "", "package_that_is_not_there")
    monkeypatch.setattr(commands, "COMMANDS", (lacking,))
    assert main(["up"]) == 1
    said = capsys.readouterr().err
    assert "package_that_is_not_there is not installed" in said
    assert "make setup" in said


def test_no_command_waits_for_the_imports_of_another() -> None:
    code = (
        "import sys\nfrom gspo_core.cli import main\n"
        "try: main(['jobs', '--help'])\nexcept SystemExit: pass\n"
        "assert 'services.launch.commands' in sys.modules\n"
        "slow = {'services.launch.up', 'services.launch.launchers', 'services.hosts.openenv_server'}\n"
        "assert not slow & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_registry_is_all_that_the_library_knows_of_the_service() -> None:
    named = {
        (path.name, word)
        for path in (ROOT / "gspo_core").rglob("*.py")
        for line in path.read_text().splitlines()
        for word in line.replace('"', " ").replace("'", " ").split()
        if word.startswith("services.") and ("import" in line or "REGISTRY" in line)
    }
    assert named == {("service.py", service.REGISTRY)}
