"""The sections of ``CHANGELOG.md``: what a version changed, and what no version holds yet.

Rule: text in, text out; whoever calls reads and writes the file.
"""

from __future__ import annotations

import re
from datetime import date

from release import NotReady

UNRELEASED = "## Unreleased"
_OPEN = re.compile(rf"^{UNRELEASED}$\n(?P<entries>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def changes(text: str, of: str) -> str:
    """The section of a version. Raises NotReady."""
    section = re.search(rf"^## {re.escape(of)}[, ].*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise NotReady(f"CHANGELOG.md has no section for {of}: python -m release.cut {of} makes it of `{UNRELEASED}`")
    return section[0].strip() + "\n"


def unreleased(text: str) -> str:
    """What is there for the next version. Raises NotReady where the section is missing."""
    section = _OPEN.search(text)
    if section is None:
        raise NotReady(f"CHANGELOG.md has no section `{UNRELEASED}`")
    return section["entries"].strip()


def demand_nothing_unreleased(text: str) -> None:
    """Raises NotReady: what would be built has changes that its version does not tell."""
    if entries := re.findall(r"^- ", unreleased(text), re.MULTILINE):
        raise NotReady(
            f"CHANGELOG.md has {len(entries)} changes under `{UNRELEASED}`, which no version holds: "
            "python -m release.cut VERSION gives them one; commit what it writes, and build from there"
        )


def dated(text: str, version: str, day: date) -> str:
    """``text`` with what is unreleased under a version of its own. Raises NotReady."""
    if re.search(rf"^## {re.escape(version)}[, ]", text, re.MULTILINE):
        raise NotReady(f"CHANGELOG.md has a section for {version} already")
    entries = unreleased(text)
    if not re.search(r"^- ", entries, re.MULTILINE):
        raise NotReady(f"CHANGELOG.md has nothing under `{UNRELEASED}` that {version} would bring")
    section = f"{UNRELEASED}\n\n## {version}, {day.isoformat()}\n\n{entries}\n\n"
    return _OPEN.sub(lambda _: section, text, count=1).rstrip() + "\n"
