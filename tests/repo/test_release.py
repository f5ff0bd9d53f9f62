"""A release: one version everywhere, a changelog that tells all of it, a bill of materials that names both wheels."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from datetime import date
from pathlib import Path

import pytest

from gspo_core import __version__
from release import NotReady, build, changelog, cut, places
from release.bill import bill_of_materials

ROOT = Path(__file__).parents[2]
DAY = date(2031, 5, 17)
# Where a version stands beside our name, or alone as ours.
WRITTEN = re.compile(
    rf"(gspo[\w\[\],-]*(==|:|:\$\{{GSPO_VERSION:-)|^__version__ = \"){re.escape(__version__)}\b", re.MULTILINE
)
LOG = """# Changelog

For users.

## Unreleased

### Added
- A thing.

### Fixed
- Another.

## 0.1.0, 2026-01-01

- The first.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that a new version touches."""
    root = tmp_path / "tree"
    for place in places.PLACES:
        for path in ROOT.glob(place.files):
            copied = root / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    (root / "CHANGELOG.md").write_text(LOG)
    return root


def test_every_place_names_this_version() -> None:
    assert places.version(ROOT) == __version__
    assert __version__ in changelog.changes((ROOT / "CHANGELOG.md").read_text(), __version__).splitlines()[0]


def test_a_place_that_names_another_version_is_told(tree: Path) -> None:
    compose = tree / "docker-compose.yml"
    compose.write_text(compose.read_text().replace(__version__, "0.1.9", 1))
    with pytest.raises(NotReady, match=rf"docker-compose\.yml: 0\.1\.9, {re.escape(__version__)}"):
        places.version(tree)


def test_a_version_without_changes_is_not_ready() -> None:
    with pytest.raises(NotReady, match=r"no section for 9\.9\.9: python -m release\.cut 9\.9\.9"):
        changelog.changes(LOG, "9.9.9")


def test_a_cut_names_the_version_everywhere_and_dates_what_was_unreleased(tree: Path) -> None:
    written = cut.cut(tree, "9.9.9", DAY)
    assert places.version(tree) == "9.9.9"
    log = (tree / "CHANGELOG.md").read_text()
    assert changelog.changes(log, "9.9.9") == "## 9.9.9, 2031-05-17\n\n### Added\n- A thing.\n\n### Fixed\n- Another.\n"
    assert log.index("## Unreleased") < log.index("## 9.9.9") < log.index("## 0.1.0, 2026-01-01\n\n- The first.\n")
    changelog.demand_nothing_unreleased(log)
    assert tree / "CHANGELOG.md" in written
    left = [path for path in tree.rglob("*") if path.is_file() and WRITTEN.search(path.read_text())]
    assert left == []


def test_no_other_file_writes_our_version() -> None:
    """Whoever adds a place adds it to the table, or a cut would leave it behind."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {path for place in places.PLACES for path in ROOT.glob(place.files)}
    text = {".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ".env", ""}
    others = [
        path
        for name in tracked
        if (path := ROOT / name).suffix in text
        and path not in known
        and not name.startswith(("benchmarks/results", "tests/"))
    ]
    assert len(others) > 500
    assert [path for path in others if path.exists() and WRITTEN.search(path.read_text(errors="replace"))] == []


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("next", "is no version"),
        (__version__, "is not above"),
        ("0.0.9", "is not above"),
        ("9.9.9", "has a section for"),
    ],
)
def test_a_cut_that_cannot_be_writes_nothing(version: str, problem: str, tree: Path) -> None:
    log = tree / "CHANGELOG.md"
    log.write_text(LOG + "\n## 9.9.9, 2030-01-01\n\n- Cut before.\n")
    before = {path: path.read_text() for path in tree.rglob("*") if path.is_file()}
    with pytest.raises(NotReady, match=problem):
        cut.cut(tree, version, DAY)
    assert {path: path.read_text() for path in tree.rglob("*") if path.is_file()} == before


def test_nothing_unreleased_is_no_release(tree: Path) -> None:
    cut.cut(tree, "9.9.9", DAY)
    with pytest.raises(NotReady, match=r"nothing under `## Unreleased` that 9\.9\.10 would bring"):
        cut.cut(tree, "9.9.10", DAY)


def test_the_command_says_what_it_wrote_and_what_comes_next(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cut, "ROOT", tree)
    monkeypatch.setattr("sys.argv", ["cut", "9.9.9rc1"])
    assert cut.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert {"CHANGELOG.md", "docker-compose.yml", "gspo_core/__init__.py"} <= set(said)
    assert "make release" in said[-1]
    assert cut.main() == 1
    assert "not ready: 9.9.9rc1 is not above 9.9.9rc1" in capsys.readouterr().err


def test_nothing_is_built_while_changes_are_unreleased(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tree / "CHANGELOG.md"
    log.write_text(LOG.replace("0.1.0", __version__))
    monkeypatch.setattr(build, "ROOT", tree)
    target = tree / "dist"
    monkeypatch.setattr("sys.argv", ["build", "--target", str(target)])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert "2 changes under `## Unreleased`" in said
    assert "python -m release.cut VERSION" in said
    assert not target.exists()
    built: list[Path] = []
    monkeypatch.setattr(build, "build", built.append)
    cut.cut(tree, "9.9.9", DAY)
    assert build.main() == 0
    assert built == [target]
    assert (target / "CHANGES.md").read_text().startswith("## 9.9.9, 2031-05-17\n")


def test_nothing_is_built_of_files_that_no_commit_has(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    build.demand_committed(tree)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    subprocess.run(["git", "config", "status.showUntrackedFiles", "no"], cwd=tree, check=True)
    monkeypatch.setattr(build, "ROOT", tree)
    monkeypatch.setattr("sys.argv", ["build", "--target", str(tree / "dist")])
    assert build.main() == 1
    assert "not ready: not all of this is committed:\n?? CHANGELOG.md" in capsys.readouterr().err
    assert not (tree / "dist").exists()
    commit = ["-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", "--message", "x"]
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    subprocess.run(["git", *commit], cwd=tree, check=True)
    build.demand_committed(tree)


def test_nothing_is_built_where_git_does_not_say_what_is_committed(tree: Path) -> None:
    (tree / ".git").write_text("nothing that git knows")
    with pytest.raises(NotReady, match="git does not say what is committed: "):
        build.demand_committed(tree)


LISTED = {
    "components": [
        {"bom-ref": "gspo==0.2.0", "name": "gspo", "externalReferences": [{"url": "file:///somewhere"}]},
        {"bom-ref": "httpx==0.28.1", "name": "httpx", "version": "0.28.1"},
        {"bom-ref": "huggingface_hub==2.4.0", "name": "huggingface_hub", "version": "2.4.0"},
        {"bom-ref": "torch==2.13.0+cpu", "name": "torch", "version": "2.13.0+cpu"},
        {"bom-ref": "pytest==9.2.0", "name": "pytest", "version": "9.2.0"},
    ],
    "dependencies": [
        {"ref": "root-component", "dependsOn": ["httpx==0.28.1", "pytest==9.2.0"]},
        {"ref": "gspo==0.2.0", "dependsOn": ["httpx==0.28.1"]},
        {"ref": "httpx==0.28.1"},
    ],
    "metadata": {"component": {"bom-ref": "root-component", "name": "gspo", "type": "application"}},
}


def test_the_bill_of_materials_names_both_wheels_and_what_they_need(tmp_path: Path) -> None:
    """The program that lists an environment's packages stands here with what it prints."""
    wheels, target = tmp_path / "dist", tmp_path / "bill.json"
    build.build(wheels)
    program = tmp_path / "cyclonedx-py"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(LISTED)}\nE\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    bill_of_materials(str(program), wheels, target)
    bill = json.loads(target.read_text())
    ours = {one["purl"]: one for one in bill["components"] if one["name"].startswith("gspo")}
    assert set(ours) == {f"pkg:pypi/gspo@{__version__}", f"pkg:pypi/gspo-service@{__version__}"}
    for path in wheels.glob("*.whl"):
        (one,) = [one for one in ours.values() if one["name"] == path.name.split("-")[0].replace("_", "-")]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert (one["hashes"], one["version"]) == ([{"alg": "SHA-256", "content": digest}], __version__)
        assert one["licenses"][0]["license"]["id"] == "Apache-2.0"
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    gspo, service = f"gspo=={__version__}", f"gspo-service=={__version__}"
    assert needs["root-component"] == [gspo, service]
    assert needs[service] == [gspo]
    assert needs[gspo] == ["httpx==0.28.1", "huggingface_hub==2.4.0", "torch==2.13.0+cpu"]
    assert needs.keys() <= {"root-component", *(one["bom-ref"] for one in bill["components"])}
    assert "file://" not in target.read_text()
    assert bill["metadata"]["component"]["version"] == __version__
