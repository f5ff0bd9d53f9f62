"""The bill of materials (CycloneDX): our wheels by their digests, and every package of the environment that the tests
ran in.

Rule: it is the same wherever it is made from one commit and one set of pins, so no path of a machine is in it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
_ROOT_COMPONENT = "root-component"


class Wheel(NamedTuple):
    """A wheel of ours, and what its metadata says."""

    path: Path
    metadata: Message

    @property
    def name(self) -> str:
        return str(canonicalize_name(self.metadata["Name"]))

    @property
    def ref(self) -> str:
        return f"{self.name}=={self.metadata['Version']}"


def bill_of_materials(cyclonedx: str, wheels: Path, target: Path) -> None:
    """``cyclonedx``: the program that lists the packages of an environment; ``wheels``: the folder that has ours."""
    program = [cyclonedx, "environment", "--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    text = subprocess.run([*program, sys.prefix], capture_output=True, text=True, check=True).stdout
    bill = with_wheels(json.loads(text), [_read(path) for path in sorted(wheels.glob("*.whl"))])
    target.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")


def with_wheels(bill: dict[str, Any], wheels: list[Wheel]) -> dict[str, Any]:
    """``bill`` with our wheels in place of the checkout, which it names by a path of this machine."""
    ours = {one["bom-ref"] for one in bill["components"] if one["name"].startswith("gspo")}
    packages = [one for one in bill["components"] if one["bom-ref"] not in ours]
    refs = {canonicalize_name(one["name"]): one["bom-ref"] for one in packages}
    refs |= {wheel.name: wheel.ref for wheel in wheels}
    kept = [one for one in bill["dependencies"] if one["ref"] not in {*ours, _ROOT_COMPONENT}]
    extras = {canonicalize_name(one.name): one.extras for wheel in wheels for one in _requirements(wheel) if one.extras}
    needs = [{"ref": wheel.ref, "dependsOn": _needed(wheel, refs, extras)} for wheel in wheels]
    root = {"ref": _ROOT_COMPONENT, "dependsOn": [wheel.ref for wheel in wheels]}
    component = bill["metadata"]["component"] | {"version": wheels[0].metadata["Version"]}
    return bill | {
        "metadata": bill["metadata"] | {"component": component},
        "components": [*(_component(wheel) for wheel in wheels), *packages],
        "dependencies": [root, *needs, *kept],
    }


def _read(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return Wheel(path, message_from_bytes(archive.read(name)))


def _requirements(wheel: Wheel) -> list[Requirement]:
    return [Requirement(line) for line in wheel.metadata.get_all("Requires-Dist", [])]


def _needed(wheel: Wheel, refs: dict[str, str], extras: dict[str, set[str]]) -> list[str]:
    """Without an extra, and with those in which another wheel of ours takes it: nobody else's are known here."""
    wanted = ["", *sorted(extras.get(wheel.name, ()))]
    found = {
        refs[name]
        for one in _requirements(wheel)
        if (name := canonicalize_name(one.name)) in refs
        and (one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted))
    }
    return sorted(found - {wheel.ref})


def _component(wheel: Wheel) -> dict[str, Any]:
    version = wheel.metadata["Version"]
    return {
        "bom-ref": wheel.ref,
        "type": "application",
        "name": wheel.name,
        "version": version,
        "description": wheel.metadata["Summary"],
        "purl": f"pkg:pypi/{wheel.name}@{version}",
        "licenses": [{"license": {"acknowledgement": "declared", "id": wheel.metadata["License-Expression"]}}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.path.read_bytes()).hexdigest()}],
    }
