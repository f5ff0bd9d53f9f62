"""One list of what a sandbox promises, run on every kind of them; ``make real-containers`` adds those of Docker."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from environments.sandbox import command
from environments.sandbox.contract import Command, File, Sandbox, Sandboxes, SandboxFailed, archive
from tests.services.hosts.sandbox_kit import KINDS, at, begun, of_kind, ran

pytestmark = pytest.mark.skipif(command.refusal() is not None, reason="this machine runs no such commands, and says so")
# Enough for bash to begin, everywhere; what waits for its end waits that long.
SHORT_S = 4.0


@pytest.fixture(scope="module", params=KINDS)
def sandboxes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxes]:
    with of_kind(request.param, tmp_path_factory.mktemp("sandboxes")) as made:
        yield made


@pytest.fixture
def sandbox(sandboxes: Sandboxes) -> Iterator[Sandbox]:
    made = begun(sandboxes.create())
    try:
        yield made
    finally:
        made.close()


def test_they_are_offered_here(sandboxes: Sandboxes) -> None:
    assert sandboxes.refusal() is None


def test_a_command_says_what_it_says_and_how_it_ended(sandbox: Sandbox) -> None:
    ended = ran(sandbox, 'echo out; echo err >&2; echo "$GREETING"; pwd; exit 3', GREETING="good 'morning'")
    work = at(sandbox, "work")
    assert (ended.status, ended.timed_out, ended.output) == (3, False, f"out\nerr\ngood 'morning'\n{work}\n")
    assert ran(sandbox, "cat; echo $HOME $TMPDIR").output == f"{work} {at(sandbox, 'tmp')}\n"
    assert ran(sandbox, "kill -TERM $$").status == 128 + 15


def test_files_stay_from_one_command_to_the_next(sandbox: Sandbox) -> None:
    ran(sandbox, "echo kept > note")
    assert ran(sandbox, "cat note").output == "kept\n"


def test_a_command_past_its_deadline_is_ended_with_what_it_has_said(sandbox: Sandbox) -> None:
    ended = ran(sandbox, "echo begun; sleep 1000", SHORT_S)
    assert (ended.timed_out, ended.output) == (True, "begun\n")
    assert ran(sandbox, "echo on").output == "on\n"


@pytest.mark.parametrize("ending", ["true", "sleep 1000"])
def test_nothing_that_a_command_has_started_outlives_it(sandbox: Sandbox, ending: str) -> None:
    daemon = "(setsid bash -c 'echo > begun; trap \"\" TERM; while :; do echo x >> ticks; sleep 0.05; done' &)"
    ended = ran(sandbox, f"{daemon}; until [ -s ticks ]; do :; done; {ending}", SHORT_S if ending != "true" else 60.0)
    assert ended.timed_out == (ending != "true")
    before = sandbox.get(at(sandbox, "work/ticks"), 1 << 20)
    assert ran(sandbox, "sleep 0.5").status == 0
    assert sandbox.get(at(sandbox, "work/ticks"), 1 << 20) == before


def test_of_a_long_output_the_beginning_and_the_end_are_kept(sandbox: Sandbox) -> None:
    ended = ran(sandbox, "echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last", most_bytes=1000)
    assert ended.output.startswith("first\nxxx")
    assert ended.output.endswith("xxx\nlast\n")
    assert "bytes left out" in ended.output
    assert len(ended.output) < 1100


def test_files_go_in_as_they_are_and_come_out(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 8
    sandbox.put(
        archive([File("work/deep/er"), File("work/deep/er/data", data, 0o640), File("work/go", b"echo hi", 0o755)])
    )
    assert ran(sandbox, "stat -c %a deep/er/data go; ./go 2> /dev/null || bash go").output == "640\n755\nhi\n"
    assert sandbox.get(at(sandbox, "work/deep/er/data"), 1 << 20) == data
    assert sandbox.get(at(sandbox, "work/deep/er/data"), 10) == data[:10]


def test_what_is_put_in_place_of_something_finds_nothing_there(sandbox: Sandbox) -> None:
    ran(sandbox, "mkdir there; echo mine > there/forged; ln -s /etc other")
    sandbox.put(
        archive([File("work/there"), File("work/other")]), [at(sandbox, "work/there"), at(sandbox, "work/other")]
    )
    assert ran(sandbox, "find there other | sort").output == "other\nthere\n"
    assert ran(sandbox, "ls /etc | head -n 1").output != ""


def test_only_a_regular_file_is_read_and_no_link_followed(sandbox: Sandbox) -> None:
    ran(sandbox, "ln -s /etc/passwd link; mkfifo pipe; mkdir folder; echo x > file")
    assert sandbox.get(at(sandbox, "work/file"), 100) == b"x\n"
    for name in ("link", "pipe", "folder", "nothing", "nothing/below"):
        assert sandbox.get(at(sandbox, f"work/{name}"), 100) is None


def test_what_lies_outside_of_it_is_not_written(sandbox: Sandbox) -> None:
    name = f"escaped-{uuid.uuid4().hex}"
    ran(sandbox, "ln -s / out")
    for path in (f"../{name}", f"work/out/{name}"):
        with contextlib.suppress(SandboxFailed):
            sandbox.put(archive([File(path, b"x")]))
    assert not Path("/", name).exists()
    assert sandbox.root == "/" or not Path(sandbox.root).with_name(name).exists()


def test_an_episode_goes_on_in_a_new_one_from_its_snapshot(sandboxes: Sandboxes, sandbox: Sandbox) -> None:
    ran(
        sandbox,
        "pwd > where; mkdir -m 700 in; echo deep > in/file; ln -s $PWD/in link; echo t > $TMPDIR/t; chmod 700 where",
    )
    state = sandbox.snapshot([at(sandbox, "work"), at(sandbox, "tmp")], 1 << 20)
    assert state is not None
    other = sandboxes.create()
    try:
        other.restore(state)
        said = ran(other, "cat where link/file $TMPDIR/t; stat -c %a in where; touch new")
        assert said.output == f"{at(other, 'work')}\ndeep\nt\n700\n700\n"
        assert ran(sandbox, "ls new").status != 0  # they share nothing
    finally:
        other.close()


def test_there_is_no_snapshot_of_what_is_too_large(sandbox: Sandbox) -> None:
    ran(sandbox, "head -c 200000 /dev/urandom > big")
    assert sandbox.snapshot([at(sandbox, "work")], 100_000) is None
    assert sandbox.snapshot([at(sandbox, "work")], 1 << 20) is not None


def test_a_snapshot_that_is_none_is_refused(sandboxes: Sandboxes) -> None:
    other = sandboxes.create()
    try:
        with pytest.raises(SandboxFailed):
            other.restore(b'["work"]\nnothing')
    finally:
        other.close()


def test_two_of_them_see_nothing_of_each_other(sandboxes: Sandboxes, sandbox: Sandbox) -> None:
    other = begun(sandboxes.create())
    try:
        ran(sandbox, "echo secret > mine")
        assert ran(other, f"cat {at(sandbox, 'work')}/mine").status != 0
    finally:
        other.close()


def test_a_command_reads_neither_the_environment_nor_the_memory_of_its_server(sandbox: Sandbox) -> None:
    said = ran(sandbox, "cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | grep -c GSPO_; echo")
    assert said.output == "0\n\n"


def test_a_command_that_cannot_be_started_is_no_success(sandbox: Sandbox) -> None:
    nowhere = at(sandbox, "nowhere")
    try:
        status = sandbox.run(Command("true", nowhere, nowhere, nowhere, {}, 60.0, 100)).status
    except SandboxFailed:
        return
    assert status != 0


def test_a_closed_one_does_nothing_more(sandboxes: Sandboxes) -> None:
    made = begun(sandboxes.create())
    made.close()
    made.close()
    with pytest.raises(SandboxFailed):
        ran(made, "true")


def test_several_are_used_at_once(sandboxes: Sandboxes) -> None:
    def one(number: int) -> str:
        made = begun(sandboxes.create())
        try:
            return ran(made, f"echo {number} > n; sleep 0.2; cat n").output
        finally:
            made.close()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(6))) == [f"{number}\n" for number in range(6)]
