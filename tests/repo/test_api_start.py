"""What the API does not load at its start, and what it does not work out anew then."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from starlette.routing import Route

from benchmarks.structure.source import imported_at_start, read_modules
from services.api.app import create_app

ROOT = Path(__file__).parents[2]


def test_the_api_loads_no_worlds_chat_formats_or_spec_files_at_its_start() -> None:
    loaded = imported_at_start("services.api.__main__", read_modules(ROOT))
    unused = ("gspo_core.env", "gspo_core.chat", "gspo_core.spec_file", "services.state.child")
    assert not [name for name in loaded if f"{name}.".startswith(tuple(f"{one}." for one in unused))]


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


def test_each_route_is_built_once() -> None:
    """Those of a router that an application includes are built anew, and once more in each application."""
    first, second = (create_app(nullcontext).routes for _ in range(2))  # type: ignore[arg-type]
    assert len(first) > 50
    assert all(isinstance(route, Route) for route in first)
    own = [one for one, other in zip(first, second, strict=True) if one is not other]
    assert [route.path for route in own if isinstance(route, Route)] == ["/openapi.json"]
