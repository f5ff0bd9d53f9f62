"""The page about the API names every route and every error code that there is, and none that is not."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from services.api.app import create_app
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import ApiProcess

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()
# Of the standard's own statuses that no route of ours can bring about.
UNREACHABLE = {"invalid_request"}


def document() -> dict[str, Any]:
    return create_app(contextlib.nullcontext).openapi()  # type: ignore[arg-type]


def test_answers_are_described_by_the_texts_under_their_fields():
    shapes = document()["components"]["schemas"]
    described = {
        "AttemptView": {"code", "step"},
        "ShownRequest": {"model", "num_repeats"},
    }
    for name, fields in described.items():
        assert {field for field, one in shapes[name]["properties"].items() if "description" in one} == fields, name


def test_every_route_is_on_the_page_and_no_other():
    routes = {f"{method.upper()} {path}" for path, methods in document()["paths"].items() for method in methods}
    assert set(re.findall(r"^\| `([A-Z]+ /[^`]*)`", PAGE, re.MULTILINE)) == routes


def test_every_parameter_of_a_route_is_in_its_row():
    """But for `limit` and `after`, which are said once for all lists."""
    rows = dict(re.findall(r"^\| `([A-Z]+ /[^`]*)` \| (.*) \|$", PAGE, re.MULTILINE))
    missing = []
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            row = rows[f"{method.upper()} {path}"]
            named = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"} - {
                "limit",
                "after",
            }
            missing += [f"{method} {path}: {name}" for name in named if not re.search(rf"\b{name}\b", row)]
    assert missing == []


def test_every_error_code_is_on_the_page_and_no_other():
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "api").rglob("*.py"))
    sources += "".join((ROOT / "gspo_core" / name).read_text() for name in ("problems.py", "live_settings.py"))
    patterns = (
        r'RequestRefused\(\s*\d+,\s*"(\w+)"',
        r'_unauthorized\("(\w+)"',
        r'\(\d{3}, "(\w+)"',
        r'40[45]: \("(\w+)"',
        r'Problem\(\s*"(\w+)"',
        r'Unavailable\(\s*"(\w+)"',
        r'"extra_forbidden": "(\w+)", "missing": "(?:\w+)"',
        r'"missing": "(\w+)"',
        r'\.get\(kind, "(\w+)"\)',
    )
    used = {code for pattern in patterns for code in re.findall(pattern, sources)} - UNREACHABLE
    table = PAGE[PAGE.index("| status | codes |") : PAGE.index("## Who may")]
    shown = {word for word in re.findall(r"`([a-z_]+)`", table)}
    assert shown == used
    assert len(used) > 15


def commands() -> list[str]:
    """The shell commands of the page, one a line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_command_on_the_page_works(redis_server: RedisServer, store: Store, tmp_path: Path):
    """In order, as somebody types them. What a rollout worker is asked is 503 here, with the reason."""
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    job = ""
    with ApiProcess(redis_server.url, GSPO_ENV_UPLOADS="true") as api:
        assert len(commands()) >= 6
        for command in commands():
            assert command.startswith("curl "), command
            # A stream has no end before its job has.
            options = f"-m {2 if '/events' in command else 60} -w '\\n%{{http_code}}'"
            typed = command.replace("curl ", f"curl {options} ", 1).replace("$JOB", job)
            typed = typed.replace("localhost:8000", api.url.removeprefix("http://"))
            done = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True, check=False)
            body, _, status = done.stdout.rpartition("\n")
            if re.search(r"/(tasks|try)\b", command):
                assert (status, json.loads(body)["error"]["code"]) == ("503", "no_worker"), command
            else:
                assert status in ("200", "201"), (command, done.stdout, done.stderr)
            if "/v1/jobs " in command:
                job = json.loads(body)["id"]
    assert job
