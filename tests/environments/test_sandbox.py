"""Commands behind a view: what they reach, when they end, what they leave; and folders as bytes."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from environments.sandbox import command, folder
from gspo_core import landlock
from tests.apparatus.processes import is_running

pytestmark = pytest.mark.skipif(command.refusal() is not None, reason="this machine runs no such commands, and says so")

SECRET = "what the tests expect"
# Generous: it ends a test that would otherwise hang.
LONG_S = 60.0
# Long enough for bash to have begun.
SHORT_S = 3.0


def ran(work: Path, text: str, timeout_s: float = LONG_S, most_bytes: int = 4000, **variables: str) -> command.Ended:
    return command.run(
        ["/bin/bash", "-c", text],
        command.FileSystemView([str(work)]),
        directory=str(work),
        environment=command.variables(str(work), str(work), variables),
        timeout_s=timeout_s,
        most_bytes=most_bytes,
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def test_a_command_says_what_it_says_and_how_it_ended(work: Path) -> None:
    ended = ran(work, "echo out; echo err >&2; touch made; exit 3")
    assert (ended.status, ended.timed_out, ended.output) == (3, False, "out\nerr\n")
    assert (work / "made").exists()
    assert ran(work, "kill -TERM $$").status == 128 + 15
    assert ran(work, "yes | head -n 1; echo ${PIPESTATUS[0]}").output == "y\n141\n"


def test_a_command_that_does_not_end_is_ended_with_what_it_has_said(work: Path) -> None:
    ended = ran(work, "echo begun; sleep 1000", SHORT_S)
    assert (ended.timed_out, ended.output) == (True, "begun\n")


@pytest.mark.parametrize("ending", ["true", "sleep 1000"])
def test_nothing_that_a_command_has_started_outlives_it(work: Path, ending: str) -> None:
    daemon = "(setsid bash -c 'echo $$ > daemon; exec sleep 1000' > /dev/null 2>&1 &)"
    ended = ran(work, f"{daemon}; until [ -s daemon ]; do :; done; {ending}", 20.0 if ending == "true" else 5.0)
    assert ended.timed_out == (ending != "true")
    assert not is_running(int((work / "daemon").read_text()))


def test_of_a_long_output_the_beginning_and_the_end_are_kept(work: Path) -> None:
    ended = ran(work, "echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last", most_bytes=1000)
    assert ended.output.startswith("first\nxxx")
    assert ended.output.endswith("xxx\nlast\n")
    assert "bytes left out" in ended.output
    assert len(ended.output) < 1100


def test_a_command_inherits_no_variable(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_REDIS_URL", SECRET)
    assert SECRET not in ran(work, "env; cat /proc/*/environ 2> /dev/null").output
    assert ran(work, 'echo "$GIVEN"', GIVEN="yes").output == "yes\n"


@pytest.mark.parametrize(
    "attempt",
    [
        *("cat {secret}", "cp {secret} .", "ln {secret} here; cat here", "ln -s {secret} here; cat here"),
        *("cat /proc/{pid}/root{secret}", "ls {folder}", "cat < {secret}"),
    ],
)
def test_a_command_reads_nothing_beside_its_view(work: Path, tmp_path: Path, attempt: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    ended = ran(work, attempt.format(secret=secret, pid=os.getpid(), folder=tmp_path))
    assert ended.status != 0
    assert SECRET not in ended.output
    assert "secret" not in ended.output.replace(str(tmp_path / "secret"), "")
    assert not [path for path in work.iterdir() if path.is_file() and not path.is_symlink()]


def test_a_command_changes_nothing_beside_its_view(work: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for attempt in (f"echo > {secret}", f"rm -f {secret}", f"mv {secret} .", f"touch {tmp_path}/new", f"rmdir {work}"):
        assert ran(work, attempt).status != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "work"]
    assert secret.read_text() == SECRET


def test_a_command_cannot_look_into_the_process_that_wanted_it(work: Path) -> None:
    ended = ran(work, f"cd /proc/{os.getpid()}; cat environ; head -c 1 mem; ls fd/0/ cwd/")
    assert ended.status != 0
    assert ended.output.count("Permission denied") == 4, ended.output


def test_a_command_has_no_capabilities(work: Path) -> None:
    assert ran(work, "grep -E '^Cap(Eff|Prm)' /proc/self/status").output.split()[1::2] == ["0" * 16] * 2


@pytest.mark.skipif(landlock.version() < 6, reason="older kernels do not withhold signals, which docs/worlds.md says")
def test_a_command_ends_nothing_but_itself(work: Path) -> None:
    ended = ran(work, f"kill -9 $PPID; kill -9 {os.getpid()}; echo alive")
    assert ended.output.endswith("alive\n")
    assert ended.output.count("not permitted") == 2


def test_what_the_machine_refuses_is_not_the_commands_failure(work: Path) -> None:
    view = command.FileSystemView([str(work)])
    with pytest.raises(command.SandboxFailed, match="could not be started"):
        command.run(["/nowhere"], view, directory="/", environment={}, timeout_s=LONG_S, most_bytes=100)


def test_the_interpreter_is_found(work: Path) -> None:
    found = ran(work, f"python{sys.version_info.major} -c 'print(6 * 7)'")
    assert (found.status, found.output) == (0, "42\n")


# folders


def filled(root: Path) -> None:
    (root / "app" / "deep").mkdir(parents=True)
    (root / "app" / "deep" / "text").write_text(f"it lies in {root}/app")
    (root / "app" / "binary").write_bytes(b"\xff\x00")
    (root / "app" / "program").write_text("#!/bin/sh\n")
    (root / "app" / "program").chmod(0o751)
    (root / "app" / "near").symlink_to(root / "app" / "binary")
    (root / "app" / "far").symlink_to("/usr/bin/env")
    os.utime(root / "app" / "deep" / "text", ns=(10**18, 10**18))


def test_a_folder_comes_back_as_it_was_and_names_its_new_place(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    filled(old)
    new.mkdir()
    state = folder.packed(old, ("app",), 1 << 20)
    assert state is not None
    folder.unpack(state, new, str(old))
    assert (new / "app/deep/text").read_text() == f"it lies in {new}/app"
    assert (new / "app/deep/text").stat().st_mtime_ns == 10**18
    assert (new / "app/binary").read_bytes() == b"\xff\x00"
    assert stat.S_IMODE((new / "app/program").stat().st_mode) == 0o751
    assert os.readlink(new / "app/near") == str(new / "app/binary")
    assert os.readlink(new / "app/far") == "/usr/bin/env"


def test_a_binary_that_names_its_place_cannot_be_moved(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    filled(old)
    new.mkdir()
    (old / "app/binary").write_bytes(b"\xff" + str(old).encode())
    state = folder.packed(old, ("app",), 1 << 20)
    assert state is not None
    with pytest.raises(ValueError, match="binary names the folder"):
        folder.unpack(state, new, str(old))


def test_there_is_no_picture_of_what_is_too_large_or_unusual(tmp_path: Path) -> None:
    filled(tmp_path)
    assert folder.packed(tmp_path, ("app",), 10) is None
    assert folder.packed(tmp_path, ("app",), 1 << 20) is not None
    os.mkfifo(tmp_path / "app" / "pipe")
    assert folder.packed(tmp_path, ("app",), 1 << 20) is None


def test_a_folder_is_removed_whatever_its_modes_say_and_links_are_not_followed(tmp_path: Path) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    filled(root)
    kept.mkdir()
    (kept / "file").touch()
    (root / "link").symlink_to(kept)
    (root / "app" / "deep").chmod(0)
    folder.remove(root)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()
