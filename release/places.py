"""The places that write our version: what each says, and how a new one is written there.

Rule: who reads and who writes share one table, so a place that is compared is one that a new version reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from release import NotReady

VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_ASSIGNED = r'^__version__ = "(?P<version>[^"]+)"$'
_TAG = r"\b(?:newN|n)ame: gspo-[a-z-]+, newTag: (?P<version>[^\s,}]+)"


class Place(NamedTuple):
    """Files by a pattern below the root, and what stands around the version in them."""

    files: str
    pattern: re.Pattern[str]


PLACES = tuple(
    Place(files, re.compile(pattern, re.MULTILINE))
    for files, pattern in (
        ("gspo_core/__init__.py", _ASSIGNED),
        ("release/service/gspo_service/__init__.py", _ASSIGNED),
        ("release/service/pyproject.toml", r'"gspo\[[a-z,-]+\]==(?P<version>[^"]+)"'),
        ("docker-compose.yml", r"image: gspo-[a-z-]+:\$\{GSPO_VERSION:-(?P<version>[^}]+)\}"),
        ("k8s/**/kustomization.yaml", _TAG),
        ("examples/kuberay/*", r"\bgspo-[a-z-]+:(?P<version>\d[\w.]*)"),
        ("docs/commands.md", r"^\$ gspo version\n(?P<version>\S+)$"),
    )
)


def _texts(root: Path, place: Place) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.glob(place.files)):
        if path.is_file():
            yield path, path.read_text(encoding="utf-8")


def named(root: Path) -> dict[str, set[str]]:
    """Each place, with the versions that it says."""
    return {
        place.files: {found["version"] for _, text in _texts(root, place) for found in place.pattern.finditer(text)}
        for place in PLACES
    }


def version(root: Path) -> str:
    """The one that every place says. Raises NotReady."""
    said = named(root)
    found = set[str]().union(*said.values())
    if len(found) != 1 or not all(said.values()):
        lines = "\n".join(f"  {place}: {', '.join(sorted(versions)) or 'nothing'}" for place, versions in said.items())
        raise NotReady(f"the version is not one:\n{lines}")
    return found.pop()


def rewritten(root: Path, new: str) -> dict[Path, str]:
    """The files that change where every place says ``new``, with their text. Nothing is written."""
    texts: dict[Path, str] = {}
    for place in PLACES:
        for path, text in _texts(root, place):
            changed = place.pattern.sub(lambda found: _replaced(found, new), text)
            if changed != text:
                texts[path] = changed
    return texts


def _replaced(found: re.Match[str], new: str) -> str:
    begin, end = (edge - found.start() for edge in found.span("version"))
    return found[0][:begin] + new + found[0][end:]
