"""``make release``: everything that people install, from one version, into one folder; then the images.

Rule: what is written depends on the commit alone, so that anyone can build it again and compare digests.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from release import NotReady, changelog, images, places
from release.bill import bill_of_materials

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ROOT / "release" / "service"


def version() -> str:
    """Raises NotReady."""
    return places.version(ROOT)


def build(target: Path) -> None:
    """Wheels and source archive."""
    moment = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": moment or "1700000000"}
    for folder, kinds in ((ROOT, ("wheel", "sdist")), (SERVICE, ("wheel",))):
        for kind in kinds:
            program = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
            done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotReady(f"{folder.name}: {done.stderr.strip()}")


def demand_committed(root: Path) -> None:
    """That the files are those of the commit; an unpacked archive has none, and is taken as it is. Raises NotReady."""
    if not (root / ".git").exists():
        return
    ask = ["git", "status", "--porcelain", "--untracked-files=all"]
    try:
        told = subprocess.run(ask, cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotReady(f"git does not say what is committed: {error}") from error
    if told.returncode:
        raise NotReady(f"git does not say what is committed: {told.stderr.strip()}")
    if told.stdout.strip():
        raise NotReady(f"not all of this is committed:\n{told.stdout.rstrip()}")


def digests(folder: Path) -> str:
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(folder.iterdir()))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release.build", description="Build what people install.")
    parser.add_argument("--target", type=Path, default=ROOT / "dist", help="made anew (default: dist)")
    parser.add_argument("--cyclonedx", help="the program cyclonedx-py; without it there is no bill of materials")
    parser.add_argument("--images", action="store_true", help="then the images, where a Docker daemon answers")
    arguments = parser.parse_args()
    target: Path = arguments.target
    try:
        demand_committed(ROOT)
        number = version()
        log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        changelog.demand_nothing_unreleased(log)
        text = changelog.changes(log, number)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        build(target)
        (target / "CHANGES.md").write_text(text, encoding="utf-8")
        if arguments.cyclonedx:
            bill_of_materials(arguments.cyclonedx, target, target / f"gspo-{number}.cdx.json")
    except NotReady as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    sums = digests(target)
    (target / "SHA256SUMS").write_text(sums, encoding="utf-8")
    print(sums, end="", flush=True)
    if arguments.images:
        try:
            print(images.build(ROOT))
        except images.NotBuilt as error:
            print(f"the files are in {target}, the images are not built: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
