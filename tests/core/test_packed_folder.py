"""A folder becomes the same bytes wherever and whenever it is packed, and nothing but its content gets in."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from gspo_core.packed_folder import MAX_BYTES, FolderRefused, pack_folder


def filled(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    return folder


def names_in(packed: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(packed)).namelist()


def test_the_same_content_is_the_same_bytes(tmp_path: Path):
    names = ["world/__init__.py", "world/guess.py", "tasks.jsonl"]
    one, two = filled(tmp_path / "one", names), filled(tmp_path / "two", names[::-1])
    for path in two.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o755)
    assert pack_folder(one) == pack_folder(two)
    (two / "tasks.jsonl").write_text("another\n")
    assert pack_folder(one) != pack_folder(two)


def test_what_is_hidden_or_made_by_python_stays_out(tmp_path: Path):
    filled(tmp_path, ["a.py", ".git/config", ".env", "__pycache__/a.cpython-311.pyc", "b/c.pyc", "b/d.py"])
    assert names_in(pack_folder(tmp_path)) == ["a.py", "b/d.py"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_are_refused(tmp_path: Path, kind: str):
    filled(tmp_path, ["world/a.py", "elsewhere/b.py"])
    (tmp_path / "world" / "link").symlink_to(tmp_path / ("elsewhere/b.py" if kind == "file" else "elsewhere"))
    with pytest.raises(FolderRefused, match="link"):
        pack_folder(tmp_path / "world")


def test_what_cannot_be_uploaded_is_said_here(tmp_path: Path):
    with pytest.raises(FolderRefused, match="not a folder"):
        pack_folder(tmp_path / "nothing")
    with pytest.raises(FolderRefused, match="no file"):
        pack_folder(tmp_path)
    (tmp_path / "large.bin").write_bytes(b"x" * MAX_BYTES)
    with pytest.raises(FolderRefused, match="10 MiB"):
        pack_folder(tmp_path)
