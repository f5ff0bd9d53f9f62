"""What cannot be of a job's past is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_core.cli import main
from gspo_core.replay.bundle import _becoming
from gspo_core.replay.past import NotKept, Past
from tests.core.learner_support import write_model
from tests.core.past_kit import make_past, spec_of

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("past")
    return make_past(root / "job_a", spec_of(write_model(root / "model")), steps=STEPS, trains=False).folder


@pytest.mark.parametrize("steps", [("--first", "99"), ("--first", "3", "--last", "2")])
def test_tables_of_steps_that_are_not_kept(
    folder: Path, tmp_path: Path, steps: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    assert main(["tables", str(folder), "--to", str(tmp_path / "tables"), *steps]) == 1
    assert "kept are the batch logs of 1-3" in capsys.readouterr().err
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize("steps", [("--first", "99"), ("--first", "3", "--last", "2")])
def test_rescoring_of_steps_that_are_not_kept(
    folder: Path, tmp_path: Path, steps: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(episode):\n    return 1.0\n")
    assert main(["rescore", str(folder), "--reward", f"{reward}:score", *steps]) == 1
    assert "kept are the batch logs of 1-3" in capsys.readouterr().err


def test_a_chain_is_not_left_without_the_signature_that_it_was_to_have(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_text("no key")
    assert main(["bundle", f"{folder}@1", "--to", str(tmp_path / "none" / "steps.gspo")]) == 1
    (folder / "weights").mkdir(exist_ok=True)
    assert main(["audit", str(folder), "--to", str(tmp_path / "job.chain"), "--sign", str(key)]) == 1
    assert capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]


def test_half_a_bundle_is_never_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full."""

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "steps.gspo"
    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile.writestr", is_full)
        assert main(["bundle", f"{folder}@2", "--to", str(target)]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(["bundle", f"{folder}@2", "--to", str(target)]) == 0


def test_what_a_killed_process_left_of_a_bundle_is_no_hindrance(folder: Path, tmp_path: Path) -> None:
    left = tmp_path / ".steps.gspo.part"
    left.write_bytes(b"half a bundle, longer than the whole one" * 100_000)
    assert main(["bundle", f"{folder}@2", "--to", str(tmp_path / "steps.gspo")]) == 0
    assert main(["bundle", f"{folder}@2", "--to", str(tmp_path / "other.gspo")]) == 0
    assert not left.exists()
    assert (tmp_path / "steps.gspo").read_bytes() == (tmp_path / "other.gspo").read_bytes()


def test_two_who_write_one_bundle_do_not_write_into_each_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "steps.gspo"
    with _becoming(target) as file:
        file.write(b"the first one's")
        assert main(["bundle", f"{folder}@2", "--to", str(target)]) == 1
        assert "is being written by another process" in capsys.readouterr().err
    assert target.read_bytes() == b"the first one's"


def test_a_file_that_its_job_removes_meanwhile_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job that runs does with its oldest logs."""
    read = Path.read_bytes

    def removed(path: Path) -> bytes:
        if path.parent.name == "batches" and (tmp_path / ".steps.gspo.part").exists():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", removed)
    assert main(["bundle", f"{folder}@2", "--to", str(tmp_path / "steps.gspo")]) == 1
    assert "was removed just now: ask again" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_never_taken_is_told_with_those_that_were(folder: Path) -> None:
    """At once, however far away it is: no list of the steps on the way is made."""
    for step in (STEPS + 1, 99, 10**15):
        with pytest.raises(NotKept, match=f"^nothing that is kept leads to step {step}; there is a way to 0-{STEPS}$"):
            Past(folder).way_to(step)


@pytest.mark.parametrize(
    "step", ["0", "-1", "2-1", "1-", "+1", "1.0", "", " 1", "\u0663", "9" * 5000, "1-" + "9" * 5000]
)
@pytest.mark.parametrize("command", ["replay", "bundle"])
def test_what_names_no_step_is_refused_in_a_sentence(
    folder: Path, tmp_path: Path, command: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--to", str(tmp_path / "steps.gspo")] if command == "bundle" else []
    assert main([command, f"{folder}@{step}", *more]) == 1
    assert "write JOB@STEP" in (said := capsys.readouterr().err) or "steps count from 1" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["-1", "1-2", " 1", "\u0663", "", "9" * 5000])
def test_what_names_no_step_to_fork_is_refused_before_anybody_is_asked(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", f"job_a@{step}", "--url", "http://127.0.0.1:9"]) == 1
    assert "write JOB@STEP" in capsys.readouterr().err
