"""Writes what pages say that the code knows better: ``make docs``. CI writes it again, and nothing may change.

docs/dialects.md and gspo_core/api_answers.py as a whole, the codes in docs/failures.md, the settings in
docs/operations.md, and each command's help in docs/commands.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from services.process.settings import PREFIX, Settings
from tests.repo import answer_shapes, command_page, dialects, failures

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"


def settings_rows() -> str:
    """A row for each setting, as the code has it."""
    table = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        meaning = " ".join((field.description or "").split()).replace("``", "`").replace("|", "\\|")
        table.append(f"| `{PREFIX}{name.upper()}` | {shown} | {meaning} |\n")
    return "".join(table)


def with_settings(page: str) -> str:
    head, title, rest = page.partition("\n## Settings\n")
    row = re.compile(rf"(?:^\| `{PREFIX}[A-Z0-9_]+` \|.*\n)+", re.MULTILINE)
    written, count = row.subn(lambda _: settings_rows(), rest, count=1)
    if not title or not count:
        raise ValueError(f"{OPERATIONS.name} has no table under its heading Settings")
    return head + title + written


def main() -> int:
    for path, text in (
        (failures.PAGE, failures.written(failures.PAGE.read_text())),
        (dialects.PAGE, dialects.written()),
        (answer_shapes.FILE, answer_shapes.written()),
        (OPERATIONS, with_settings(OPERATIONS.read_text())),
        (command_page.PAGE, command_page.written(command_page.PAGE.read_text())),
    ):
        if path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
