"""``python -m release.cut VERSION``: what is unreleased becomes a dated section, and every place names the version.

Rule: all is checked before anything is written, and a version is above the one before. It commits and builds nothing.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import Version

from release import NotReady, changelog, places

ROOT = Path(__file__).resolve().parents[1]


def cut(root: Path, version: str, day: date) -> list[Path]:
    """The files that it wrote. Raises NotReady."""
    if places.VERSION.fullmatch(version) is None:
        raise NotReady(f"{version!r} is no version: 1.2.3, or 1.2.3rc1 before it")
    before = places.version(root)
    if Version(version) <= Version(before):
        raise NotReady(f"{version} is not above {before}, which every place names")
    log = root / "CHANGELOG.md"
    texts = places.rewritten(root, version)
    texts[log] = changelog.dated(log.read_text(encoding="utf-8"), version, day)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return sorted(texts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release.cut", description="Give what is unreleased a version.")
    parser.add_argument("version", help="such as 0.3.0: above the one that gspo_core/__init__.py names")
    version: str = parser.parse_args().version
    try:
        written = cut(ROOT, version, datetime.now(UTC).date())
    except NotReady as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    print("\n".join(str(path.relative_to(ROOT)) for path in written))
    print(f"commit these; then make release, and python -m tests.releases.make HEAD {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
