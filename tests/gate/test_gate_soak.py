"""A soak plays files in drawn orders beside drawn others, and says what failed how often."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.gate import soak

HERE = "tests/gate/test_gate_soak.py"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The orders in which the tests of a made-up file ran; every second time one fails."""
    (tmp_path / "tests").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "tests" / f"test_{name}.py").write_text(
            "import pathlib\n\n"
            + "".join(
                f"def test_{name}{number}():\n    with open({str(tmp_path / 'order')!r}, 'a') as order:\n"
                f"        order.write('{name}{number} ')\n\n"
                for number in range(4)
            )
        )
    once = f"path = pathlib.Path({str(tmp_path / 'times')!r})\n    path.write_text(path.read_text() + 'x')\n"
    (tmp_path / "times").write_text("")
    with (tmp_path / "tests" / "test_a.py").open("a") as file:
        file.write(f"def test_fails_once():\n    {once}    assert len(path.read_text()) != 2\n")
    ini = "markers =\n  slow\n  third_party\n  browser\n  quarantined\nasyncio_default_fixture_loop_scope = function\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}")
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "LOGS", tmp_path / "logs")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    orders: list[str] = []
    return orders


def test_what_fails_once_is_found_and_orders_follow_from_the_seed(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def soaked(*flags: str, busy: int = 0) -> int:
        (tmp_path / "order").write_text("")
        monkeypatch.setattr("sys.argv", ["soak", "--busy", str(busy), *flags, "tests/test_a.py"])
        status = soak.main()
        runs.append((tmp_path / "order").read_text())
        return status

    assert soaked("--times", "2", "--seed", "7") == 1
    assert "soak: 1 of 2 times: tests/test_a.py::test_fails_once" in capsys.readouterr().out
    assert soaked("--times", "2", "--seed", "7") == 0
    assert soaked("--times", "2", "--seed", "8", busy=1) == 0
    assert runs[0] == runs[1] != runs[2]
    assert {name[0] for name in runs[0].split()} == {"a", "b", "c"}
    assert len(runs[0].split()) == 2 * 12


def test_a_file_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "tests/nowhere.py"])
    assert soak.main() == 2
    assert "there is no file tests/nowhere.py" in capsys.readouterr().out


def test_others_are_never_the_file_itself() -> None:
    assert all(HERE not in soak.others([HERE], random.Random(seed)) for seed in range(300))
