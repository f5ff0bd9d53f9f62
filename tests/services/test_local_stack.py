"""What the local stack promises to whoever waits for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_core.client import Event
from services.local import demo
from services.local.demo import while_alive
from services.local.stack import Stack, StackConfig, StackError, claim_port
from services.local.up import up
from services.ports import free_port

DEADLINE_S = 60.0


def test_who_follows_a_job_learns_of_a_process_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHECK_S", 0.05)
    stack = Stack(StackConfig(tmp_path, tmp_path))
    stack.log_dir.mkdir()
    silence = threading.Event()

    def events() -> Iterator[Event]:
        yield Event("1-0", "step", {"step": 1})
        silence.wait()

    # Ends at once: it has no Redis.
    stack._spawn("trainer", [], {"PATH": os.environ["PATH"]})
    try:
        following = while_alive(stack, events())
        assert next(following).data == {"step": 1}
        with pytest.raises(StackError, match="trainer ended with code 1"):
            next(following)
    finally:
        silence.set()
        stack.close()


def test_a_folder_of_the_caller_shadows_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the wrong services')")
    monkeypatch.chdir(tmp_path)
    stack = Stack(StackConfig(tmp_path, tmp_path))
    stack.log_dir.mkdir()
    stack._spawn("rollout", ["--help"], {"PATH": os.environ["PATH"]})
    (child,) = stack._children
    try:
        assert child.process.wait(DEADLINE_S) == 0, child.last_words()
        assert "Plays episodes" in child.last_words()
    finally:
        stack.close()


def test_an_address_of_another_machine_is_one_sentence_whatever_the_port() -> None:
    for port in (0, free_port()):
        with pytest.raises(StackError, match=r"cannot listen on 192\.0\.2\.1"):
            claim_port("192.0.2.1", port)


def refusal_of_up(capsys: pytest.CaptureFixture[str], **options: object) -> str:
    given = {"data_dir": None, "model": None, "port": 0, "rollout_workers": 1} | options
    assert up(**given) == 1  # type: ignore[arg-type]
    message = capsys.readouterr()
    assert message.out == "", "it began work that could not end well"
    return message.err


def test_up_says_before_any_work_what_is_in_its_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "another program" in refusal_of_up(capsys, data_dir=str(tmp_path / "data"), port=port)
    (tmp_path / "file").touch()
    assert "choose another folder with --data-dir" in refusal_of_up(capsys, data_dir=str(tmp_path / "file"))
    (tmp_path / "data" / "models" / "calculator-tiny").mkdir(parents=True)
    assert "is not a demo model" in refusal_of_up(capsys, data_dir=str(tmp_path / "data"))
    assert "holds no model" in refusal_of_up(capsys, data_dir=str(tmp_path / "data"), model=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GSPO_REDIS_URL", "redis://127.0.0.1:9/0", "127.0.0.1:9"),
        ("GSPO_REDIS_ULR", "x", "did you mean GSPO_REDIS_URL"),
    ],
)
def test_a_redis_that_does_not_answer_and_a_misspelt_setting_are_one_sentence_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StackError, match=message), Stack(StackConfig(tmp_path, tmp_path, port=0)):
        pass
