"""What the pages promise of the code as a whole, as numbers that may only become smaller.

Rule: each ceiling is what was measured when it was last lowered. Whoever gets below it writes the new number here;
whoever would exceed it divides a file, finds a name, a type or a subject.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.structure.code import LONG_FUNCTION, WRITTEN, ambiguous_classes
from benchmarks.structure.measure import STARTS, Structure, measure
from benchmarks.structure.source import Module, imported_at_start, read_modules
from tests.repo.pages import ROOT

LONGEST_FILE = 566
LOOSE_ANNOTATIONS = 9.7
"""``Any``, ``object`` and mappings to JSON, in a thousand lines."""
NAMES_WITH_SEVERAL_MEANINGS = 0
"""Of classes."""
FOLDER_CYCLES = 0
OPENINGS_WITH_OF = 0
OPENS_WITH_OF = re.compile(r'(?:^ *"""|# )Of ', re.MULTILINE)
"""In a docstring or a comment: the phrase has no subject, so it reads only together with the name above it."""
LOADED = {"api": 132, "trainer": 97, "rollout": 115, "engine": 38, "trainer's attempt": 14}
"""Modules of ours that a process loads at its start."""

# Computing asks nobody: these start programs, wait for them, or talk to whoever sits before a terminal.
ASKS_ITS_SURROUNDINGS = {
    "gspo_core.env.acp_run",
    "gspo_core.env.agent_runs",
    "gspo_core.keeper",
    "gspo_core.replay.command",
    "gspo_core.starter.making",
    "gspo_core.starter.playing",
    "gspo_core.testing.rehearsal",
    "gspo_core.testing.watch",
}
SURROUNDINGS = re.compile(r"os\.(environ|getenv)|time\.(time|monotonic|perf_counter)(_ns)?\(|datetime\.(now|utcnow)\(")


@pytest.fixture(scope="module")
def structure() -> Structure:
    return measure(ROOT)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT)


def test_files_functions_and_annotations(structure: Structure, modules: dict[str, Module]) -> None:
    assert max(modules[name].num_lines for name in modules.keys() - WRITTEN) <= LONGEST_FILE
    assert structure.function_max <= LONG_FUNCTION
    assert structure.loose_per_kline("Any", "object", "dict[str, JSON]") <= LOOSE_ANNOTATIONS


def test_circles(structure: Structure) -> None:
    assert structure.room_cycles == []
    assert structure.module_cycles == []
    assert len(structure.folder_cycles) <= FOLDER_CYCLES


def test_what_a_process_loads_at_its_start(structure: Structure) -> None:
    assert {name: most for name, most in structure.imported.items() if most > LOADED[name]} == {}


@pytest.mark.parametrize("name", STARTS)
def test_the_modules_that_count_are_those_of_a_process(modules: dict[str, Module], name: str) -> None:
    program = f"import sys, {STARTS[name]}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert modules.keys() & set(done.stdout.split()) == imported_at_start(STARTS[name], modules)


def test_a_name_of_a_class_means_one_thing(modules: dict[str, Module]) -> None:
    several = ambiguous_classes(modules)
    assert len(several) <= NAMES_WITH_SEVERAL_MEANINGS, several


def test_docstrings_and_comments_begin_with_their_subject(modules: dict[str, Module]) -> None:
    texts = (modules[name].text for name in modules.keys() - WRITTEN)
    assert sum(len(OPENS_WITH_OF.findall(text)) for text in texts) <= OPENINGS_WITH_OF


def test_what_computes_asks_neither_variables_nor_a_clock(modules: dict[str, Module]) -> None:
    asking = {name for name, module in modules.items() if SURROUNDINGS.search(module.text)}
    assert {name for name in asking if name.startswith("gspo_core.") and ".cli" not in name} == ASKS_ITS_SURROUNDINGS


def test_the_page_states_these_limits() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    assert re.findall(r"\((\d+) lines at most\)", page) == [str(LONG_FUNCTION)]
    assert re.findall(r"files too \((\d+)", page) == [str(LONGEST_FILE)]
    assert 'opens with "Of"' in page
