"""A row of the ladder, as a real job: the rest is `make ladder`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.hosts.venv import Interpreters
from services.launch import stack as stack_of_a_user
from tests.apparatus.warm_python import WarmPython
from tests.core.qwen_vocabulary import NotToBeHad, qwen_chat_template, qwen_vocabulary
from tests.ladder import stack as stack_of_the_ladder
from tests.ladder import worlds as all_worlds
from tests.ladder.axes import Row
from tests.ladder.job import play
from tests.ladder.run import Ladder, Place, asked, line
from tests.ladder.stack import running

pytestmark = pytest.mark.timeout(600)

# A prompt beyond the window of the parity gate's probe, long answers of tools, several turns. Each row starts processes
# that import torch for each of its attempts, so the exact sizes around that window are left to the whole ladder.
ROWS = [Row(600, 1_000, 3, 5, "search_qa", 1, "template", "lora")]


@pytest.fixture
def warm_stack(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stack starts, but not the environments of this process, has been imported already."""
    for module in (stack_of_a_user, stack_of_the_ladder):
        monkeypatch.setattr(module, "sys", SimpleNamespace(executable=str(warm_python.path)))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_stack")
def test_jobs_of_a_users_sizes_are_trained(tmp_path: Path) -> None:
    try:
        qwen_vocabulary(), qwen_chat_template()
    except NotToBeHad as error:
        pytest.skip(str(error))
    place = Place(tmp_path)
    worlds = {one.name: one for one in all_worlds.shipped("")}
    worlds = {row.world: worlds[row.world] for row in ROWS}
    interpreters = Interpreters(tmp_path / "venvs")
    natures = asyncio.run(all_worlds.natures(list(worlds.values()), place.codec(), interpreters, print))
    ladder = Ladder(0, worlds, natures, ROWS, [], {})
    with running(place.data, place.model(None), num_jobs=1) as stack:
        for row in ROWS:
            (result,) = play(stack, place.data, [asked(place, ladder, 0, row)])
            print(line(result))
            assert result.problems == []
