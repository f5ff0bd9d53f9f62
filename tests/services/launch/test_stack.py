"""What the local stack promises to whoever waits for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest

from examples.demo import demo
from examples.demo.demo import while_alive
from gspo_core.api_answers import Event
from services.launch import up as local_up
from services.launch.stack import Stack, StackConfig, StackError, claim_port
from services.launch.topology import API, ENGINE, TRAINER
from services.launch.up import up
from services.process.ports import free_port

DEADLINE_S = 60.0
ENGINE_URLS = "GSPO_ENGINE_URLS"


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
        assert "Play episodes" in child.last_words()
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
    assert "choose another directory with --data-dir" in refusal_of_up(capsys, data_dir=str(tmp_path / "file"))
    (tmp_path / "data" / "models" / "calculator-tiny").mkdir(parents=True)
    assert "is not a demo model" in refusal_of_up(capsys, data_dir=str(tmp_path / "data"))
    assert "holds no model" in refusal_of_up(capsys, data_dir=str(tmp_path / "data"), model=str(tmp_path))


class _Ready(BaseHTTPRequestHandler):
    """An engine that somebody else has started, as far as a stack looks at it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_up_uses_the_engines_that_it_is_given_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def interrupted(stack: Stack, logs: object) -> NoReturn:
        started.extend(stack.pids())
        given = {child.name: child.environment[ENGINE_URLS] for child in stack._children}
        assert given["trainer"] == given["rollout-0"] == url
        raise KeyboardInterrupt

    monkeypatch.setattr(local_up, "look_after", interrupted)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as engine:
        url = f"http://127.0.0.1:{engine.server_port}"
        monkeypatch.setenv(ENGINE_URLS, url)
        monkeypatch.setenv("GSPO_API_KEYS", "")
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        assert up(data_dir=str(tmp_path), model=None, port=0, rollout_workers=1) == 0
        engine.shutdown()
    assert started == ["redis", "api", "trainer", "rollout-0", "gateway"]
    said = capsys.readouterr().out
    assert f"engines of GSPO_ENGINE_URLS: {url}" in said
    assert f"engine  {url}   (from GSPO_ENGINE_URLS; none is started here)" in said
    assert not (tmp_path / "models").exists(), "it made a model that nothing serves"


def test_engine_and_trainer_get_the_same_number_of_threads(tmp_path: Path) -> None:
    stack = Stack(StackConfig(tmp_path, tmp_path, threads=3))
    stack.log_dir.mkdir()
    stack._spawn("engine", ["--help"], {"PATH": os.environ["PATH"]})
    (engine,) = stack._children
    stack.close()
    assert engine.argv[engine.argv.index("--threads") + 1] == "3"
    assert stack._environment(TRAINER)["OMP_NUM_THREADS"] == stack._environment(ENGINE)["OMP_NUM_THREADS"] == "3"
    assert stack._environment(API)["OMP_NUM_THREADS"] == "1"


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
