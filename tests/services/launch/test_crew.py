"""Members that something else starts: in order, again when they end, told when they cannot, out in reverse order."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services.files.data_dir import DataDir
from services.launch import crew_run, follower, supervisor
from services.launch.crew import TRIES, Crew, CrewError
from services.launch.installation import Installation, Ports
from services.launch.placement import Member, PlacementRequest, place
from services.launch.topology import Site
from services.process.children import die_with_parent
from tests.patience import HANG_S

DEADLINE_S = HANG_S
# It looks again and again: `signal.pause` would sleep through a signal that came just before it.
FOR_EVER = "while True: time.sleep(0.01)"
WAITS = f"import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('here', flush=True)\n{FOR_EVER}"
DEAF = f"import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('here', flush=True)\n{FOR_EVER}"
ENDS = "print('no such device', flush=True); raise SystemExit(3)"


class Here:
    """Starts a program of the test's, whatever the member's own command is, and notes what it is asked."""

    def __init__(self, data_dir: DataDir, programs: Mapping[str, str]) -> None:
        self.data_dir = data_dir
        self.programs = programs
        self.started: list[str] = []
        self.asked: list[str] = []
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, member: Member, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        self.started.append(member.name)
        with self.data_dir.log_of(member.name).open("ab") as log:
            argv = [sys.executable, "-u", "-c", self.programs.get(member.name, WAITS)]
            self.children[member.name] = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with_parent())
        return Process(self, member.name, self.children[member.name])


class Process:
    def __init__(self, place: Here, name: str, child: subprocess.Popen[bytes]) -> None:
        self.place = place
        self.name = name
        self.child = child

    def poll(self) -> int | None:
        return self.child.poll()

    def ask_to_leave(self) -> None:
        self.place.asked.append(self.name)
        self.child.terminate()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


class Clock:
    """Every pause is an hour, but a short one: waiting costs nothing, and deadlines come."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0.01)


class _Fine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def crew_of(
    tmp_path: Path, programs: Mapping[str, str], *, ports: Ports | None = None, engines: int = 1
) -> tuple[Crew, Here, list[str]]:
    data_dir = DataDir(tmp_path)
    data_dir.logs.mkdir()
    members = place(PlacementRequest(engines=engines), Site.BATCH)
    whole = Installation(members, ("127.0.0.1",), data_dir, "m", "python", "redis", ports or Ports(api=9, engine=9))
    here, said, clock = Here(data_dir, programs), [], Clock()
    return Crew(whole, here, said.append, clock=clock, pause=clock.pause), here, said


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_they_start_in_order_and_leave_in_reverse(tmp_path: Path) -> None:
    crew, here, said = crew_of(tmp_path, {})
    crew.start()
    assert here.started == ["redis", "engine", "api", "trainer", "rollout-0", "gateway"]
    until(lambda: all("here" in crew.last_words(name) for name in here.started))
    crew.leave()
    assert here.asked == ["gateway", "rollout-0", "trainer", "api", "engine", "redis"]
    assert said == [f"{name} left with code 0" for name in here.asked]


def test_who_does_not_leave_in_its_time_is_killed_and_the_others_still_leave(tmp_path: Path) -> None:
    crew, here, said = crew_of(tmp_path, {"trainer": DEAF})
    crew.start()
    until(lambda: all("here" in crew.last_words(name) for name in here.started))
    crew.leave()
    assert "trainer is killed: it did not leave within 105 s" in said
    assert here.children["trainer"].poll() == -signal.SIGKILL
    assert said[-1] == "redis left with code 0"


def test_the_time_to_leave_runs_while_they_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks may wait for something that hangs; those that come after would have no time left."""
    crew, _, said = crew_of(tmp_path, {"trainer": DEAF})
    clock, waited, asks = Clock(), list[float](), Process.ask_to_leave

    def asks_long(process: Process) -> None:
        asks(process)
        clock.now += 1000

    def pauses(seconds: float) -> None:
        waited.append(seconds)
        clock.now += 1000

    monkeypatch.setattr(Process, "ask_to_leave", asks_long)
    monkeypatch.setattr(crew, "_clock", clock)
    monkeypatch.setattr(crew, "_pause", pauses)
    crew.start()
    until(lambda: "here" in crew.last_words("trainer"))
    crew.leave()
    assert waited == []
    assert "trainer is killed: it did not leave within 105 s" in said


def test_an_installation_that_finds_another_one_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crew, here, _ = crew_of(tmp_path, {})

    def told_to_leave(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", told_to_leave)  # it would wait for the other's end
    folder = here.data_dir.redis
    folder.mkdir()
    with (folder / "launched.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert crew_run.run(crew._installation, here, None) == crew_run.TOLD_TO_LEAVE
    assert here.started == []
    assert "the data directory is in use" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends_with", "told", "status"),
    [(CrewError("no such device"), "no such device", 1), (KeyboardInterrupt(), "asked to leave", 143)],
)
def test_why_an_installation_ends_is_told_before_its_members_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends_with: BaseException,
    told: str,
    status: int,
) -> None:
    crew, here, _ = crew_of(tmp_path, {})

    def ends(_: Crew) -> None:
        raise ends_with

    monkeypatch.setattr(Crew, "start", ends)
    monkeypatch.setattr(Crew, "leave", lambda _: print("all have left"))
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)
    assert crew_run.run(crew._installation, here, None) == status
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split("  ")[-1] for line in last] == [told, "all have left"]


def test_what_ends_is_started_again(tmp_path: Path) -> None:
    crew, here, said = crew_of(tmp_path, {})
    crew.start()
    here.children["engine"].kill()
    until(lambda: "engine" in crew.ended())
    for _ in range(2):
        crew.look()
        crew._pause(supervisor.FIRST_WAIT_S)
    crew.look()
    assert here.started.count("engine") == 2
    assert said == ["engine was killed by SIGKILL; restarting it in 1 s", "engine is running again"]
    crew.leave()


@pytest.mark.parametrize(("over", "status"), [(0, 0), (1, 1)])
def test_a_job_is_followed_again_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: int, status: int
) -> None:
    """An outage of the API, or the death of the follower, ends no installation: its key makes it the same job."""
    crew, here, _ = crew_of(tmp_path, {})
    ends = [f"raise SystemExit({follower.API_AWAY})", "import os; os.kill(os.getpid(), 9)", f"raise SystemExit({over})"]
    started: list[Sequence[str]] = []

    def starts(argv: Sequence[str], **_: object) -> subprocess.Popen[bytes]:
        started.append(argv)
        return popen([sys.executable, "-c", ends[len(started) - 1]])

    popen = subprocess.Popen
    for name in ("start", "until_ready", "look", "leave"):
        monkeypatch.setattr(Crew, name, lambda _: None)
    monkeypatch.setattr(crew_run.subprocess, "Popen", starts)
    monkeypatch.setattr(crew_run, "FOLLOW_AGAIN_S", 0.0)
    monkeypatch.setattr(crew_run.signal, "signal", lambda *_: signal.SIG_DFL)
    submission = crew_run.Submission(Path("job.yaml"), "mine")
    assert crew_run.run(crew._installation, here, submission) == status
    assert len(started) == 3
    assert all(argv == started[0] for argv in started)
    assert "--key=mine" in started[0]


class _Refuses(BaseHTTPRequestHandler):
    status = 422

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _IsBroken(_Refuses):
    status = 500


class _IsAnotherJobs(_Refuses):
    """Nearly every 409 is final: of a key that another job has, of a step that is not kept."""

    status = 409


class _IsLoading(_Refuses):
    status = 503


def test_a_follower_tells_an_api_that_is_away_from_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"model": "m", "environments": [{"ref": "a:B"}]}')

    def followed(url: str) -> int:
        monkeypatch.setattr(sys, "argv", ["follower", str(file), "--key=mine", "--url", url])
        return follower.main()

    for answers, expected in ((_Refuses, 1), (_IsBroken, 1), (_IsAnotherJobs, 1), (_IsLoading, follower.API_AWAY)):
        with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}"
            assert followed(url) == expected
            server.shutdown()
    assert followed(url) == follower.API_AWAY  # nothing listens there now


@pytest.mark.parametrize("failing", [("engine-0", "engine-1"), ("trainer",)])
def test_what_cannot_start_is_told_with_its_last_words(failing: tuple[str, ...], tmp_path: Path) -> None:
    crew, here, said = crew_of(tmp_path, dict.fromkeys(failing, ENDS), engines=2)
    crew.start()
    with pytest.raises(CrewError, match=f"{failing[0]} cannot start: it ended 3 times in a row, with code 3") as told:
        crew.until_ready()
    assert "no such device" in str(told.value)
    assert here.started.count(failing[0]) == 3
    # What it waits between its tries is little beside the 30 s in which this is to be told.
    waited = [int(line.split()[-2]) for line in said if line.startswith(f"{failing[0]} ended with code 3")]
    assert waited[: TRIES - 1] == [1, 2]
    crew.leave()


def test_one_broken_engine_of_two_stops_nothing(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        ports = Ports(api=server.server_port, engine=server.server_port)
        crew, here, said = crew_of(tmp_path, {"engine-1": ENDS}, ports=ports, engines=2)
        crew.start()
        until(lambda: "engine-1" in crew.ended())
        crew.until_ready()
        server.shutdown()
    for _ in range(200):
        crew.look()
        crew._pause(1)
    assert here.started.count("engine-1") > 3
    assert any("engine-1 ended with code 3" in line for line in said)
    crew.leave()
