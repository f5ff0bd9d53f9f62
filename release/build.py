"""``make release``: everything that people install, from one version, into one folder; then the images.

Rule: what is written depends on the commit alone, so that anyone can build it again and compare digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from release import images

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ROOT / "release" / "service"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_TAG = re.compile(r"newName: gspo-[a-z-]+, newTag: ([^}]+)}|name: gspo-[a-z-]+, newTag: ([^}]+)}")
_IMAGE = re.compile(r"image: gspo-[a-z-]+:\$\{GSPO_VERSION:-([^}]+)\}")
_REQUIREMENT = re.compile(r'"gspo\[[a-z,-]+\]==([^"]+)"')


class NotReady(Exception):
    """What is to be done first."""


def versions() -> dict[str, set[str]]:
    """Each place that names our version, with what it says."""
    manifests = "".join(path.read_text() for path in sorted((ROOT / "k8s").rglob("kustomization.yaml")))
    return {
        "gspo_core/__init__.py": set(_VERSION.findall((ROOT / "gspo_core" / "__init__.py").read_text())),
        "release/service/gspo_service/__init__.py": set(
            _VERSION.findall((SERVICE / "gspo_service" / "__init__.py").read_text())
        ),
        "release/service/pyproject.toml": set(_REQUIREMENT.findall((SERVICE / "pyproject.toml").read_text())),
        "docker-compose.yml": set(_IMAGE.findall((ROOT / "docker-compose.yml").read_text())),
        "k8s": {tag for tags in _TAG.findall(manifests) for tag in tags if tag},
    }


def version() -> str:
    """Raises NotReady."""
    named = versions()
    found = set[str]().union(*named.values())
    if len(found) != 1 or not all(named.values()):
        said = "\n".join(f"  {place}: {', '.join(sorted(tags)) or 'nothing'}" for place, tags in named.items())
        raise NotReady(f"the version is not one:\n{said}")
    return found.pop()


def changes(of: str) -> str:
    """What the changelog says of a version. Raises NotReady."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(of)}[, ].*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise NotReady(f"CHANGELOG.md has no section for {of}: give `## Unreleased` its version and date")
    return section[0].strip() + "\n"


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


def bill_of_materials(cyclonedx: str, target: Path) -> None:
    """Of the environment that the tests ran in, without ourselves, whom it names by a path of this machine."""
    program = [cyclonedx, "environment", "--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    text = subprocess.run([*program, sys.prefix], capture_output=True, text=True, check=True).stdout
    bill = json.loads(text)
    ours = {one["bom-ref"] for one in bill["components"] if one["name"].startswith("gspo")}
    bill["components"] = [one for one in bill["components"] if one["bom-ref"] not in ours]
    bill["dependencies"] = [one for one in bill["dependencies"] if one["ref"] not in ours]
    target.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")


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
        number = version()
        text = changes(number)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        build(target)
        (target / "CHANGES.md").write_text(text, encoding="utf-8")
        if arguments.cyclonedx:
            bill_of_materials(arguments.cyclonedx, target / f"gspo-{number}.cdx.json")
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
