"""The page about the API names every route and every error code that there is, and none that is not."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from services.api.app import create_app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
# Of the standard's own statuses that no route of ours can bring about.
UNREACHABLE = {"invalid_request"}


def document() -> dict[str, Any]:
    return create_app(contextlib.nullcontext).openapi()  # type: ignore[arg-type]


def test_every_route_is_on_the_page_and_no_other():
    routes = {f"{method.upper()} {path}" for path, methods in document()["paths"].items() for method in methods}
    assert set(re.findall(r"^\| `([A-Z]+ /[^`]*)`", PAGE, re.MULTILINE)) == routes


def test_every_error_code_is_on_the_page_and_no_other():
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "api").rglob("*.py"))
    sources += "".join((ROOT / "gspo_core" / name).read_text() for name in ("problems.py", "live_settings.py"))
    patterns = (
        r'ApiError\(\s*\d+,\s*"(\w+)"',
        r'_unauthorized\("(\w+)"',
        r'\(\d{3}, "(\w+)"',
        r'40[45]: \("(\w+)"',
        r'Problem\(\s*"(\w+)"',
        r'"extra_forbidden": "(\w+)", "missing": "(?:\w+)"',
        r'"missing": "(\w+)"',
        r'\.get\(kind, "(\w+)"\)',
    )
    used = {code for pattern in patterns for code in re.findall(pattern, sources)} - UNREACHABLE
    table = PAGE[PAGE.index("| status | codes |") : PAGE.index("## Who may")]
    shown = {word for word in re.findall(r"`([a-z_]+)`", table)}
    assert shown == used
    assert len(used) > 15
