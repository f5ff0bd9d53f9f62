"""All numbers of one tree.

A room is what has walls: ``gspo_core``, ``environments`` and each folder of ``services``. A file that lies in
``services`` itself belongs to no folder, so it counts as a room of its own. Arrows count an import wherever it stands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.structure.code import (
    LONG_FUNCTION,
    ambiguous_classes,
    function_lengths,
    loose_annotations,
    percentile,
)
from benchmarks.structure.graph import Graph, cycles, floors, grouped, num_edges
from benchmarks.structure.source import Module, imported_at_start, imports_of, read_modules

# What is started as `python -m` of a module; the last is the child of a trainer that runs one attempt of a job.
STARTS = {
    "api": "services.api.__main__",
    "trainer": "services.trainer.__main__",
    "rollout": "services.rollout.__main__",
    "engine": "services.engine.__main__",
    "trainer's attempt": "services.trainer.attempt_main",
}


# The rooms that play episodes.
WING = ("services.episodes", "services.workers", "services.rollout", "services.gateway")


@dataclass(frozen=True)
class Structure:
    num_modules: int
    num_lines: int
    num_test_lines: int
    num_lines_beside: int
    """Tests, benchmarks and examples together."""
    num_wing_files: int
    num_wing_lines: int
    num_ambiguous_classes: int
    num_rooms: int
    num_loose_files: int
    """Files in ``services`` that are in no room."""
    num_floors: int
    num_arrows: int
    room_cycles: list[list[str]]
    folder_cycles: list[list[str]]
    module_cycles: list[list[str]]
    """By imports at the top of modules; those inside functions are added in ``lazy_cycles``."""
    lazy_cycles: list[list[str]]
    imported: dict[str, int]
    """Modules of ours that a process loads at its start."""
    function_p95: int
    function_max: int
    num_long_functions: int
    file_max: int
    loose: dict[str, int]

    @property
    def tests_per_line(self) -> float:
        return self.num_test_lines / self.num_lines

    def loose_per_kline(self, *kinds: str) -> float:
        return 1000 * sum(self.loose.get(kind, 0) for kind in kinds) / self.num_lines

    def to_dict(self) -> dict[str, int | dict[str, int] | list[list[str]]]:
        return asdict(self)


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "services" else parts[0]


def import_graph(modules: dict[str, Module], *, at_start: bool = False) -> Graph:
    return {name: imports_of(module, modules, at_start=at_start) for name, module in modules.items()}


def room_graph(modules: dict[str, Module]) -> Graph:
    """Without the package ``services`` itself, which holds nothing."""
    graph = grouped(import_graph(modules), room_of)
    graph.pop("services", None)
    return {room: others - {"services"} for room, others in graph.items()}


def lines_by_room(modules: dict[str, Module]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for name, module in modules.items():
        lines[room_of(name)] += module.num_lines
    return lines


def measure(root: Path) -> Structure:
    modules = read_modules(root)
    graph = import_graph(modules)
    rooms = room_graph(modules)
    lengths = function_lengths(modules.values())
    wing = [module.num_lines for name, module in modules.items() if room_of(name) in WING]
    return Structure(
        num_modules=len(modules),
        num_lines=sum(module.num_lines for module in modules.values()),
        num_test_lines=_num_lines(root, "tests"),
        num_lines_beside=_num_lines(root, "tests", "benchmarks", "examples"),
        num_wing_files=len(wing),
        num_wing_lines=sum(wing),
        num_ambiguous_classes=len(ambiguous_classes(modules)),
        num_rooms=len(rooms),
        num_loose_files=sum(room in modules and not modules[room].is_package for room in rooms),
        num_floors=1 + max(floors(rooms).values()),
        num_arrows=num_edges(rooms),
        room_cycles=cycles(rooms),
        folder_cycles=cycles(grouped(graph, lambda name: modules[name].path.parent.as_posix())),
        module_cycles=cycles(import_graph(modules, at_start=True)),
        lazy_cycles=cycles(graph),
        imported={
            process: len(imported_at_start(start, modules)) for process, start in STARTS.items() if start in modules
        },
        function_p95=percentile(lengths, 0.95),
        function_max=max(lengths),
        num_long_functions=sum(length > LONG_FUNCTION for length in lengths),
        file_max=max(module.num_lines for module in modules.values()),
        loose=dict(loose_annotations(modules.values())),
    )


def _num_lines(root: Path, *folders: str) -> int:
    files = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
