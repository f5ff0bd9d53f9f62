"""What README.md, docs/api.md, docs/control.md, docs/environments.md and docs/performance.md type works on the stacks
that they start, one after the other: in a new folder with the files that they say to save, in the order of the pages.

Two things differ from what is typed: the port is a free one, and "path/to/model" is the demo's. Whoever follows a job
(``--watch``, the client in Python) is interrupted as soon as it has shown a step; the rest would take hours.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.cli.watch import TERMINAL
from services.process.ports import free_port
from tests.repo.block_table import LIVE, held
from tests.repo.pages import ROOT, Block, block, blocks, commands_in_prose, without_comments

pytestmark = pytest.mark.slow

START_S = 240.0
STEP_S = 600.0
END_S = 180.0
# Of README.md, in a sentence.
IN_PROSE = ("gspo env validate counter.py:Counter", "gspo submit examples/demo/job.yaml --watch")


def wait_until(done: Callable[[], object], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class Terminal:
    """A folder in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.prelude = ""

    def job(self) -> str:
        newest = httpx.get(f"{self.url}/v1/jobs?order=desc").json()["data"]
        return str(newest[0]["id"]) if newest else ""

    @contextmanager
    def begun(self, command: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A command that goes on; what it says is in the file."""
        environment = os.environ | {"GSPO_URL": self.url, "PYTHONUNBUFFERED": "1"}
        environment |= {"JOB": self.job()} if "$JOB" in command else {}
        said = self.folder / "said"
        with said.open("wb") as file:
            child = subprocess.Popen(
                ["bash", "-c", f"{self.prelude}{command}"],
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield child, said.rename(self.folder / f"said-{child.pid}")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def run(self, command: str) -> str:
        with self.begun(command) as (child, said):
            assert child.wait(END_S) == 0, (command, said.read_text())
            return said.read_text()

    def follow(self, command: str) -> None:
        """Until a step was shown; then Ctrl-C. What ran before has the engine, so it ends first."""
        before = self.job()
        if before:
            self.run(f"gspo cancel {before}")
            wait_until(lambda: self.status(before) in TERMINAL, END_S, lambda: f"{before} is {self.status(before)}")
        with self.begun(command) as (child, said):

            def shown() -> bool:
                assert child.poll() is None, (command, said.read_text())
                return re.search(r"^step\b.*\d", said.read_text(), re.MULTILINE) is not None

            wait_until(shown, STEP_S, said.read_text)
            os.killpg(child.pid, signal.SIGINT)
            child.wait(END_S)
        assert self.job() != before

    def status(self, job: str) -> str:
        return str(httpx.get(f"{self.url}/v1/jobs/{job}").json()["status"])


def furnish(folder: Path, model_dir: Path) -> None:
    """What the pages say is there, or is to be saved."""
    for place in ("path/to/model", "models/Qwen3-0.6B", ".gspo/models/calculator-tiny"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(model_dir)
    (folder / ".venv").symlink_to(sys.prefix)
    for part in ("services", "examples"):
        (folder / part).symlink_to(ROOT / part)
    (folder / "counter.py").write_text(block("README.md", "class Counter").text)
    (folder / "job.yaml").write_text(block("README.md", "ref: counter.py").text)
    (folder / "shop.py").write_text(block("docs/environments.md", '"""shop.py"""').text)
    (folder / "shop.yaml").write_text(block("docs/environments.md", "# shop.yaml").text)


def commands(one: Block) -> Iterator[str]:
    if one.language != "python":
        yield from (line for line in without_comments(one.typed).splitlines() if line.strip())


def type_program(one: Block, terminal: Terminal) -> None:
    program = one.text.replace("http://127.0.0.1:8000", terminal.url)
    (terminal.folder / "typed.py").write_text(program)
    terminal.follow("python typed.py")


def type_command(command: str, terminal: Terminal) -> None:
    if command.startswith("source "):
        terminal.prelude = f"{command}; "
    elif command.endswith("--watch"):
        terminal.follow(command)
    else:
        terminal.run(command)


@contextmanager
def stack(up: str, terminal: Terminal) -> Iterator[None]:
    """What ``gspo up`` starts, until Ctrl-C."""
    with terminal.begun(f"exec {up} --port {terminal.port}") as (process, said):

        def greeted() -> bool:
            assert process.poll() is None, said.read_text()
            return "submit a job with" in said.read_text()

        wait_until(greeted, START_S, said.read_text)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
        assert said.read_text().endswith("stopped; nothing is left running\n")


class Stacks:
    """One at a time, as the pages start them; a page that starts none finds the one of the first page's first line."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._first = self._newest = ""
        self._running = ExitStack()

    def start(self, up: str) -> None:
        self.stop()
        self._first, self._newest = self._first or up, up
        self._running.enter_context(stack(up, self._terminal))

    def turn_page(self) -> None:
        if self._newest != self._first:
            self.start(self._first)

    def stop(self) -> None:
        self._running.close()

    def __enter__(self) -> Stacks:
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)


def test_what_the_pages_type_works_on_a_live_stack(model_dir: Path, tmp_path: Path) -> None:
    furnish(tmp_path, model_dir)
    terminal = Terminal(tmp_path)
    typed = [one for one in blocks() if held(one) == [LIVE]]
    with Stacks(terminal) as stacks:
        for _, page in groupby(typed, key=lambda one: one.page):
            stacks.turn_page()
            for one in page:
                type_block(one, terminal, stacks)
        assert set(IN_PROSE) <= set(commands_in_prose(ROOT / "README.md"))
        for command in IN_PROSE:
            type_command(command, terminal)
        stacks.stop()


def type_block(one: Block, terminal: Terminal, stacks: Stacks) -> None:
    if one.language == "python":
        type_program(one, terminal)
    for command in commands(one):
        if command.startswith("gspo up"):
            stacks.start(command)
        else:
            type_command(command, terminal)
