"""What the API does not load at its start, and what it does not work out anew then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.structure.source import imported_at_start, read_modules

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
