"""What holds for every test: no property is judged by its time, and no parse meets what an earlier test left behind.

Examples of properties are drawn, except in CI: there a tree meets the same ones each time.

Python up to 3.12 cannot parse while it parses. The collector may run in the middle of `ast.parse` and finalise a task
or a connection of an earlier test; whoever reports its exception formats a traceback, and that parses too. The outer
parse then ends with "SystemError: AST constructor recursion depth mismatch", whatever its text was.

Several workers take the heaviest files first: the last one to end would otherwise work alone for minutes.

Learners of tests compute on one thread, as in `make test`, however pytest was started: threads that share few cores
with other processes wait for each other at work.

A file of an environment that a test loads puts its folder on the import path for good, and the hosts of later tests
would inherit it: the path is put back.

What a file leaves open is found at its end, and told as an error of its last test: the collector would meet it in the
middle of a later test that has nothing to do with it.

What a test leaves running ends with it, whatever it does with a cancellation.

What is imported and collected stays for the whole session. The collector leaves it alone from then on: it is more than
half a million objects, and each full collection would walk over all of them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import quarantine
from tests.apparatus import last_tasks, leaks, redis_servers
from tests.apparatus.warm_python import WarmPython
from tests.heaviest import HEAVIEST

TESTS = Path(__file__).parent
LEAKS = os.environ.get("GSPO_TEST_LEAKS", "file")
"""When what was left open is looked for: at the end of each file, or of each test."""
AT_THE_END = contextlib.ExitStack()
"""Of the session, after its last test: what would keep that one waiting for other workers."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch asks when it is imported
# The name of a Unix socket has at most 107 bytes, and what pytest and a server put below the temporary folder has 78.
if len(tempfile.gettempdir()) > 29:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same", settings.get_profile("drawn"), derandomize=True, database=None)
settings.load_profile("the same" if os.environ.get("CI") else "drawn")

parse_and_collect = ast.parse


@functools.wraps(parse_and_collect)
def parse_undisturbed(*args: Any, **kwargs: Any) -> Any:
    collects = gc.isenabled()
    gc.disable()
    try:
        return parse_and_collect(*args, **kwargs)
    finally:
        if collects:
            gc.enable()


ast.parse = parse_undisturbed
last_tasks.end_them_for_certain()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quarantine.mark(items, quarantine.rows(quarantine.PAGE.read_text()))
    if not hasattr(config, "workerinput"):
        return
    places = {name: place for place, name in enumerate(HEAVIEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if LEAKS == "each" or nextitem is None or nextitem.path != item.path:
        leaks.refuse(item.nodeid if LEAKS == "each" else item.path.name)
        gc.freeze()  # what is left now is kept by somebody: the next file's look need not walk over it


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        redis_servers.servers()  # known to all workers alike


def pytest_collection_finish() -> None:
    gc.collect()  # garbage would be frozen too, and what is wrong with it would never be said
    gc.freeze()


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(scope="session", autouse=True)
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """One for all workers: what it imports takes eight seconds of a core."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "warm"
    folder.mkdir(exist_ok=True)
    warm = AT_THE_END.enter_context(WarmPython(folder))
    yield warm
    warm.leave()


def pytest_unconfigure() -> None:
    AT_THE_END.close()


@pytest.fixture(scope="module")
def warm_children(warm_python: WarmPython) -> Iterator[None]:
    """What a module starts as `sys.executable` has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python.path))
        yield
