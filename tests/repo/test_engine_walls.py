"""Only the engines' own modules and the ones that start them know which software an engine is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Room of the engines (today's flat names too), and what starts one on this machine.
MAY_NAME_IT = re.compile(r"services/(engines/|engine_client|engine_probe|local/sglang|local/stack|launch/)")


def test_the_software_of_an_engine_is_named_where_it_is_spoken_to_and_nowhere_else() -> None:
    sources = [path for top in ("gspo_core", "environments", "services") for path in (ROOT / top).rglob("*.py")]
    for software in ("sglang", "vllm"):
        naming = {str(path.relative_to(ROOT)) for path in sources if software in path.read_text().lower()}
        assert {name for name in naming if not MAY_NAME_IT.match(name)} == set()
        assert naming, "the pattern above looks for something that exists"


def test_states_of_an_engine_are_spelled_in_one_place() -> None:
    spelled = re.compile(r"""["'](switching|dirty|joining)["']""")
    sources = [path for top in ("gspo_core", "services") for path in (ROOT / top).rglob("*.py")]
    assert {path.name for path in sources if spelled.search(path.read_text())} == {"fleet_records.py"}
