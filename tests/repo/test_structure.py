"""`benchmarks.structure` counts what it says it counts: on a tiny tree of its own, and beside Python itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.structure.__main__ import main, unpacked
from benchmarks.structure.changes import as_dict, changes_since
from benchmarks.structure.drawing import picture
from benchmarks.structure.graph import cycles, floors, grouped
from benchmarks.structure.layout import lay_out, reduced
from benchmarks.structure.measure import import_graph, lines_by_room, measure, room_graph, room_of
from benchmarks.structure.report import Kept, keep
from benchmarks.structure.source import imported_at_start, read_modules

ROOT = Path(__file__).parents[2]
TREE = {
    "gspo_core/__init__.py": "",
    "gspo_core/types.py": "from typing import Any\n\nvalue: Any = 1\n",
    "gspo_core/lazy.py": "def load():\n    from services.state import keys\n    return keys\n",
    "services/__init__.py": "",
    "services/plumbing.py": "import gspo_core.types\n",
    "services/state/__init__.py": "",
    "services/state/keys.py": "from ..plumbing import x\nfrom .names import y\n",
    "services/state/names.py": "from services.state.keys import x\n",
    "services/api/__init__.py": "",
    "services/api/__main__.py": """
        from typing import TYPE_CHECKING
        from services.state import keys
        if TYPE_CHECKING:
            from gspo_core import types

        def start():
            import gspo_core.lazy
        """,
    "tests/test_one.py": "assert True\n",
}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(tmp_path, TREE)


def test_imports_are_found_wherever_they_stand_and_however_they_are_written(tree: Path) -> None:
    graph = import_graph(read_modules(tree))
    assert graph["services.state.keys"] == {"services.plumbing", "services.state.names"}
    assert graph["gspo_core.lazy"] == {"services.state.keys"}
    assert graph["services.api.__main__"] == {"services.state.keys", "gspo_core.types", "gspo_core.lazy"}


def test_what_a_process_loads_at_its_start_leaves_functions_out_and_takes_packages_in(tree: Path) -> None:
    loaded = imported_at_start("services.api.__main__", read_modules(tree))
    assert "gspo_core.lazy" not in loaded
    assert {"services", "services.api", "services.state", "gspo_core", "gspo_core.types"} <= loaded
    assert len(loaded) == 9


@pytest.mark.parametrize("process", ["api", "rollout"])
def test_what_a_process_loads_is_what_python_loads(process: str) -> None:
    start = f"services.{process}.__main__"
    program = (
        f"import sys, {start}\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ('gspo_core', 'environments', 'services')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert imported_at_start(start, read_modules(ROOT)) == set(done.stdout.split())


def test_the_api_loads_no_worlds_chat_formats_or_spec_files_at_its_start() -> None:
    loaded = imported_at_start("services.api.__main__", read_modules(ROOT))
    unused = ("gspo_core.env", "gspo_core.chat", "gspo_core.spec_file", "services.state.child")
    assert not [name for name in loaded if f"{name}.".startswith(tuple(f"{one}." for one in unused))]
    assert len(loaded) <= 131


def test_the_api_reads_no_sources_and_no_settings_for_its_answers_at_its_start() -> None:
    program = (
        "import sys\n"
        "from pydantic._internal import _fields\n"
        "searched, found = [], _fields.extract_docstrings_from_cls\n"
        "def search(model, use_inspect=False):\n"
        "    searched.append(model.__module__)\n"
        "    return found(model, use_inspect)\n"
        "_fields.extract_docstrings_from_cls = search\n"
        "import services.api.app\n"
        "print(*sorted(set(searched)), *[name for name in sys.modules if 'settings' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = done.stdout.split()
    # What an episode's turns are made of is no model of ours.
    assert [name for name in loaded if name.startswith("services.api.views.")] == ["services.api.views.episode_views"]
    assert not {"services.process.settings", "pydantic_settings"} & set(loaded)


def test_rooms_floors_arrows_and_cycles(tree: Path) -> None:
    modules = read_modules(tree)
    rooms = room_graph(modules)
    assert rooms == {
        "gspo_core": {"services.state"},
        "services.plumbing": {"gspo_core"},
        "services.state": {"services.plumbing"},
        "services.api": {"services.state", "gspo_core"},
    }
    found = measure(tree)
    assert (found.num_rooms, found.num_loose_files, found.num_arrows) == (4, 1, 5)
    assert found.room_cycles == [["gspo_core", "services.plumbing", "services.state"]]
    assert found.num_floors == 2
    assert found.module_cycles == [["services.state.keys", "services.state.names"]]
    assert found.num_test_lines == 1
    assert room_of("services.state.lua.x") == "services.state"


def test_floors_stand_on_what_they_import() -> None:
    graph = {"top": {"left", "low"}, "left": {"low"}, "right": {"low"}, "low": set[str]()}
    assert floors(graph) == {"low": 0, "left": 1, "right": 1, "top": 2}
    assert cycles(graph) == []
    assert cycles(graph | {"low": {"top"}}) == [["left", "low", "top"]]
    assert grouped({"a.x": {"a.y", "b"}, "a.y": set(), "b": set()}, lambda name: name[0]) == {"a": {"b"}, "b": set()}


def test_loose_annotations_are_counted_where_they_annotate(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "gspo_core/a.py": """
                from typing import Any, TypeAlias, cast

                Record: TypeAlias = dict[str, Any]
                Count: TypeAlias = int

                def read(one: object, two: "list[Any]", three: dict[str, JSON], four: Record) -> dict[str, Count]:
                    return cast(Any, one)
                """,
            "services/b.py": "import typing as t\n\nx: t.Any = object()\n",
        },
    )
    assert measure(tmp_path).loose == {"Any": 3, "object": 1, "dict[str, JSON]": 1, "aliases": 1}


def test_sizes(tmp_path: Path) -> None:
    short, long = "def f():\n    return 1\n", "def g():\n" + "    x = 1\n" * 60
    write(tmp_path, {"services/a.py": short * 30 + long})
    found = measure(tmp_path)
    assert (found.function_p95, found.function_max, found.num_long_functions) == (2, 61, 1)
    assert found.file_max == found.num_lines == 121


def git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def lines(name: str, count: int) -> str:
    return "".join(f"{name}_{number} = compute_the_value({number})\n" for number in range(count))


def test_where_the_lines_went(tmp_path: Path) -> None:
    """A file stays, one moves, one leaves the product, one is merged into the first, the rest is deleted or new."""
    before = {
        "services/kept.py": lines("kept", 20),
        "services/moved.py": "import os\n" + lines("moved", 20),
        "services/demo.py": lines("demo", 20),
        "services/merged.py": lines("merged", 4),
        "services/gone.py": lines("gone", 3),
    }
    write(tmp_path, before)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "before")
    for name in before:
        (tmp_path / name).unlink()
    after = {
        "services/kept.py": lines("kept", 20) + lines("merged", 4),
        "services/files/moved.py": "import sys\n" + lines("moved", 20),
        "examples/demo.py": lines("demo", 20),
        "services/new.py": lines("new", 2),
    }
    write(tmp_path, after)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "after")
    assert as_dict(changes_since(tmp_path, "HEAD~1")) == {
        **{"stayed": 20, "moved": 20, "left": 20, "arrived": 0, "merged": 4},
        **{"imports_removed": 1, "imports_added": 1, "deleted": 3, "written": 2},
    }
    with unpacked(tmp_path, "HEAD~1") as old:
        assert sorted(path.name for path in (old / "services").iterdir()) == sorted(Path(one).name for one in before)


def test_a_column_of_the_page_is_replaced_and_the_other_stays(tmp_path: Path) -> None:
    keep("before", Kept(revision="a1", date="2026-11-01", rows={"modules": "9", "old": "1"}), tmp_path)
    keep("after", Kept(revision="b2", date="2026-11-02", rows={"modules": "7", "new": "2"}), tmp_path)
    keep("after", Kept(revision="c3", date="2026-11-03", rows={"modules": "6", "new": "2"}), tmp_path)
    table = [line for line in (tmp_path / "structure.md").read_text().splitlines() if line.startswith("|")]
    assert table == [
        "| measured | before: a1, 2026-11-01 | after: c3, 2026-11-03 |",
        "| --- | ---: | ---: |",
        "| modules | 9 | 6 |",
        "| old | 1 |  |",
        "| new |  | 2 |",
    ]


def test_the_picture_has_every_room_above_what_it_imports(tmp_path: Path) -> None:
    graph = {"services.api": {"services.state", "gspo_core"}, "services.state": {"gspo_core"}, "gspo_core": set[str]()}
    assert reduced(graph)["services.api"] == {"services.state"}
    layout = lay_out(graph | {"services.launch": set[str]()}, {"services.api", "services.launch"})
    floor = {place.name: place.floor for row in layout.places for place in row if place.name}
    assert floor == {"gspo_core": 0, "services.state": 1, "services.api": 2, "services.launch": 2}
    for row in layout.places:
        for one, other in pairwise(row):
            assert one.x + one.width / 2 < other.x - other.width / 2
    drawn = picture(graph, lines_by_room(read_modules(write(tmp_path, TREE))))
    assert drawn.count("marker-end") == 2
    assert all(f">{name}/<" in drawn for name in ("api", "state", "gspo_core"))


def test_rooms_that_import_each_other_are_not_drawn() -> None:
    with pytest.raises(ValueError, match="each other"):
        lay_out({"a": {"b"}, "b": {"a"}}, set())


def test_the_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tree", str(tree), "--json"])
    assert '"num_modules": 10' in capsys.readouterr().out
    main(["--tree", str(tree)])
    assert "arrows between rooms" in capsys.readouterr().out
