"""What the local stack promises to whoever waits for it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic import SecretStr

from examples.demo import demo
from examples.demo.demo import while_alive
from gspo_core.api_answers import Event
from gspo_core.cli import main
from services.files.data_dir import DataDir
from services.launch import up as local_up
from services.launch.engine_command import given
from services.launch.stack import Child, Stack, StackConfig, StackError, claim_port
from services.launch.topology import API, ENGINE, TRAINER
from services.process.ports import free_port
from services.state.server import RedisServer
from tests.patience import HANG_S

DEADLINE_S = HANG_S
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


def up(**options: object) -> int:
    """``gspo up`` with these options, in this process."""
    parser = argparse.ArgumentParser()
    local_up.add_options(parser)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return local_up.run(parser.parse_args(words))


def refusal_of_up(capsys: pytest.CaptureFixture[str], **options: object) -> str:
    assert up(**{"port": 0} | options) == 1
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
    answer = b'{"version": "0.5.23"}'

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("by_option", [False, True])
def test_up_uses_the_engines_that_it_is_given_and_starts_none(
    by_option: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def interrupted(stack: Stack, logs: object) -> NoReturn:
        started.extend(stack.pids())
        given = {child.name: child.environment.get(ENGINE_URLS) for child in stack._children}
        assert given["trainer"] == given["rollout-0"] == url
        raise KeyboardInterrupt

    monkeypatch.setattr(local_up, "look_after", interrupted)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as engine:
        url = f"http://127.0.0.1:{engine.server_port}"
        if not by_option:
            monkeypatch.setenv(ENGINE_URLS, url)
        monkeypatch.setenv("GSPO_API_KEYS", "")
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        assert up(data_dir=tmp_path, port=0, **({"engine_url": url} if by_option else {})) == 0
        engine.shutdown()
    assert started == ["redis", "api", "trainer", "rollout-0", "gateway"]
    said = capsys.readouterr().out
    assert f"engines that already run: {url}" in said
    assert f"engine  {url}   (already running; none is started here)" in said
    assert not (tmp_path / "models").exists(), "it made a model that nothing serves"


def test_who_comes_while_the_gateway_starts_again_waits_and_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(stack: Stack, logs: object) -> NoReturn:
        os.kill(stack.pids()["gateway"], signal.SIGKILL)
        while "gateway" not in stack.ended():
            time.sleep(0.01)
        port = int(stack.gateway_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n\r\n")
            stack.restart("gateway")
            answers.append(early.recv(1024).split(b"\r\n")[0])
        raise KeyboardInterrupt

    answers: list[bytes] = []
    monkeypatch.setattr(local_up, "look_after", struck)
    monkeypatch.setenv("GSPO_API_KEYS", "")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        assert up(data_dir=tmp_path, port=0, engine_url=f"http://127.0.0.1:{engine.server_port}") == 0
        engine.shutdown()
    assert answers == [b"HTTP/1.1 200 OK"]


def test_a_proxy_of_the_user_is_not_asked_for_what_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("http_proxy", os.environ["HTTP_PROXY"])
    monkeypatch.setattr("services.launch.stack.START_TIMEOUT_S", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            Stack(StackConfig(tmp_path, tmp_path))._wait_until_answering(f"{url}/livez", "api")
            main(["doctor", "--url", url])
        finally:
            server.shutdown()
    assert f"{url} is ready" in capsys.readouterr().out


def test_a_second_stack_of_a_directory_says_so_and_leaves_the_ports_of_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = DataDir(tmp_path)
    with contextlib.ExitStack() as first:
        first.enter_context(RedisServer.spawn(data_dir.redis))
        kept = (data_dir.port_of("gateway"), data_dir.port_of("engine"))
        for file in kept:
            server = first.enter_context(socket.create_server(("127.0.0.1", 0)))
            file.write_text(f"{server.getsockname()[1]}\n")
        api = first.enter_context(socket.create_server(("127.0.0.1", 0)))
        before = [file.read_text() for file in kept]
        with monkeypatch.context() as patched:
            patched.setattr("services.state.child.STOP_TIMEOUT_S", 0.1)  # nobody is about to leave
            with (
                pytest.raises(StackError, match=rf"process {os.getpid()} uses"),
                Stack(StackConfig(tmp_path, tmp_path, port=api.getsockname()[1])),
            ):
                pass
        assert [file.read_text() for file in kept] == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sglang_python": "/nowhere/python", "sglang": ""}, "/nowhere/python is not there"),
        ({"engine": "x {port}", "sglang": ""}, "give one of them"),
        ({"sglang_python": "/bin/python"}, "only --sglang starts it"),
        ({"sglang": "--x 'y"}, "No closing quotation"),
        ({"vllm_python": "/nowhere/python", "vllm": ""}, "/nowhere/python is not there"),
        ({"vllm_python": "/bin/python"}, "only --vllm starts it"),
        ({"vllm": "", "sglang": ""}, "--sglang and --vllm both say what an engine is"),
        ({"engine": ""}, "--engine names no program"),
        ({"engine": "x 'y"}, "No closing quotation"),
        ({"engine": "python --port {prot}"}, "--engine has {prot}; filled in here: gpus, host, model, port"),
        ({"engine": "python --config {config}"}, "--engine has {config}"),
        ({"engine": "/nowhere/engine {port}"}, "there is no such program"),
        ({"engine_url": "127.0.0.1:30000"}, "must start with http://"),
        ({"engine_url": "http://"}, "must start with http://"),
        ({"engine_url": "http://127.0.0.1:99999"}, "a port between 1 and 65535"),
        ({"engine_url": "of-tomorrow+http://127.0.0.1:1"}, "unknown kind of engine"),
        ({"gpus": "trainer:0-3"}, "there is no GPU 0/0, 0/1, 0/2, 0/3: there are none at all"),
        ({"gpus": "trainer:"}, "say trainer:0-3"),
        ({"port": 99999}, "--port 99999"),
        ({"port": -1}, "--port -1"),
        ({"trainers": 0}, "--trainers 0"),
        ({"engines": 0}, "--engines 0"),
        ({"rollout_workers": 0}, "--rollout-workers 0"),
    ],
)
def test_up_refuses_what_cannot_be(
    options: dict[str, object],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told in refusal_of_up(capsys, data_dir=tmp_path, **options)


@pytest.mark.parametrize(
    ("visible", "torch_can", "options", "told"),
    [
        ("0,1", False, ("--gpus", "trainer:0", "engines:1"), "which the torch here cannot use"),
        ("0,1", False, ("--sglang",), "hide them with CUDA_VISIBLE_DEVICES="),
        ("0,1", False, ("--vllm",), "vLLM would take GPUs"),
        ("0,0", True, (), "names a GPU twice"),
        ("0,1", True, ("--gpus", "trainer:0-1", "engines:2"), "no GPU 0/2: there are 2, counted from 0"),
        ("0,1", True, ("--gpus", "trainer:0,0", "engines:1"), "gives trainer a GPU twice"),
        ("0,1,2", True, ("--gpus", "trainer:0", "engines:1-2", "--engines", "3"), "cannot be divided evenly"),
        ("0,1", True, ("--engine-url", "http://127.0.0.1:1", "--gpus", "engines:1"), "engines are given already"),
    ],
)
def test_up_refuses_a_plan_for_gpus_that_cannot_be(
    visible: str,
    torch_can: bool,
    options: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(local_up, "torch_uses_gpus", lambda: torch_can)
    assert main(["up", "--data-dir", str(tmp_path), "--port", "0", *options]) == 1
    assert told in capsys.readouterr().err


def test_a_plan_is_printed_and_nothing_is_started_fetched_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(local_up, "torch_uses_gpus", lambda: True)
    division = ("--gpus", "trainer:0-3", "engines:4-7", "--engines", "2")
    (python := tmp_path / "python").write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    sglang = ("--sglang", "--sglang-python", str(python))
    words = ("up", "--data-dir", str(tmp_path / "data"), "--model", "Owner/name", *sglang, *division)
    assert main([*words, "--plan"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "  engine-1         GPU 6,7" in told
    assert "  trainer          GPU 0,1,2,3, 4 ranks" in told
    assert not (tmp_path / "data").exists()
    assert main([*words, "--trainers", "3", "--plan"]) == 1
    assert "cannot be divided evenly among 3 trainers" in capsys.readouterr().err


def test_a_plan_is_refused_for_a_port_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["up", "--data-dir", str(tmp_path), "--port", "99999", "--plan"]) == 1
    said = capsys.readouterr()
    assert "--port 99999: a port is a number" in said.err
    assert said.out == ""


def test_vllm_is_refused_where_engines_have_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GSPO_ENGINE_KEYS", "*=key")
    assert "its own key does not guard them" in refusal_of_up(capsys, data_dir=tmp_path, vllm="")


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}"])
def test_an_address_where_something_else_answers_is_told_at_once(
    answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Ready, "answer", answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_port}"
        assert f"{url} answers, but not as an engine" in refusal_of_up(capsys, data_dir=tmp_path, engine_url=url)
        engine.shutdown()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GSPO_API_PORT", "99999", "GSPO_API_PORT: Input should be less than"),
        ("GSPO_API_HOST", "0.0.0.0", "GSPO_API_HOST is set, but gspo up listens on loopback alone"),
        ("GSPO_GATEWAY_BIND", "127.0.0.1:1", "GSPO_GATEWAY_BIND is set, but"),
        ("GSPO_HEALTH_FILE", "/x", "GSPO_HEALTH_FILE is set, but"),
        ("GSPO_ENGINE_URL", "http://127.0.0.1:1", "did you mean GSPO_ENGINE_URLS?"),
    ],
)
def test_a_setting_that_up_does_not_act_on_is_refused(
    name: str,
    value: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    assert told in refusal_of_up(capsys, data_dir=tmp_path)


def test_the_port_is_that_of_the_setting_unless_it_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("GSPO_API_PORT", str(taken.getsockname()[1]))
        assert main(["up", "--data-dir", str(tmp_path)]) == 1
        assert f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}" in capsys.readouterr().err


def test_variables_that_nothing_reads_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_TYPO", "1")
    monkeypatch.setenv("TRAINER_GPUS", "2")
    assert main(["up", "--data-dir", str(tmp_path), "--port", "-1"]) == 1
    said = capsys.readouterr().err
    assert "GSPO_TYPO is set, and nothing here reads it" in said
    assert "TRAINER_GPUS is set, and no longer read: TRAINER_DEVICES=0,1" in said


DEAF = """
import pathlib, signal, sys, time
ready, told = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: told.touch())
ready.touch()
while True:  # `signal.pause` would sleep through a signal that came just before it
    time.sleep(0.01)
"""


def test_who_is_interrupted_while_it_stops_the_rest_kills_it(tmp_path: Path) -> None:
    stack = Stack(StackConfig(tmp_path, tmp_path))
    stack.log_dir.mkdir()
    ready, told = tmp_path / "ready", tmp_path / "told"
    argv = [sys.executable, "-c", DEAF, str(ready), str(told)]
    deaf = Child("deaf", argv, os.environ, stack.log_dir / "deaf.log")
    stack._children.append(deaf)
    until_there(ready)

    def interrupt() -> None:
        until_there(told)
        os.kill(os.getpid(), signal.SIGINT)

    second = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    try:
        second.start()
        with pytest.raises(KeyboardInterrupt):
            stack.close()
        second.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert deaf.process.returncode == -signal.SIGKILL


def until_there(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_that_is_started_here_gets_its_keys_in_a_file_of_its_own(tmp_path: Path) -> None:
    keys = (SecretStr("*=use"), SecretStr("admin@*=control"))
    config = StackConfig(tmp_path, tmp_path, engine=given("cat {config}"), engine_keys=keys)
    stack = Stack(config)
    stack.log_dir.mkdir()
    stack._engine_ports.append(1)
    (member,) = [one for one in config.members() if one.process is ENGINE]
    stack._start_member(member)
    (child,) = stack._children
    assert child.process.wait(DEADLINE_S) == 0
    assert child.last_words().split() == ["api-key:", "use", "admin-api-key:", "control"]
    assert Path(child.argv[1]).stat().st_mode & 0o077 == 0
    stack.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engines": 2}, "and --engines would start others"),
        ({"sglang": ""}, "and --sglang would start others"),
        ({"engine_url": "http://127.0.0.1:2"}, "which is meant?"),
    ],
)
def test_the_setting_is_not_overruled_without_a_word(
    options: dict[str, object],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENGINE_URLS, "http://127.0.0.1:1")
    assert told in refusal_of_up(capsys, data_dir=tmp_path, **options)


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
