"""The zoo of archives: everything that an upload must not be is refused, and nothing of it stays on disk."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.files.environments import archives
from services.files.environments.archives import ArchiveRefused, unpack

FILE = b"class World: pass\n"


def tar(*entries: tarfile.TarInfo | tuple[str, bytes], mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry, io.BytesIO(b"\0" * entry.size) if entry.size else None)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                archive.addfile(info, io.BytesIO(entry[1]))
    return packed.getvalue()


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        for name, content in entries:
            if any(name == other for other in archive.namelist()):
                with pytest.warns(UserWarning, match="Duplicate"):
                    archive.writestr(name, content)
            else:
                archive.writestr(name, content)
    return packed.getvalue()


def special(kind: bytes, name: str = "x", target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zip_special(mode: int) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo("x")
    info.external_attr = mode << 16
    info.create_system = 3
    return info, b"/etc/passwd"


def many(count: int) -> Iterable[tuple[str, bytes]]:
    return ((f"f{number}", b"") for number in range(count))


def lying_header() -> bytes:
    """Extended headers that claim gigabytes, in a few kilobytes of gzip."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    block = info.tobuf(tarfile.GNU_FORMAT)
    return gzip.compress(block + b"\0" * (150 << 20))


ZOO: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no archive": lambda: b"#!/bin/sh\n",
    "empty zip": lambda: zipped(),
    "empty tar": lambda: tar(),
    "cut gzip": lambda: tar(("a.py", FILE * 1000))[:-30],
    "cut zip": lambda: zipped(("a.py", FILE))[:-10],
    "zip: parent": lambda: zipped(("../a.py", FILE)),
    "zip: parent inside": lambda: zipped(("a/../../a.py", FILE)),
    "zip: absolute": lambda: zipped(("/tmp/a.py", FILE)),
    "zip: drive": lambda: zipped(("C:/a.py", FILE)),
    "zip: backslash": lambda: zipped(("..\\a.py", FILE)),
    "zip: symlink": lambda: zipped(zip_special(stat.S_IFLNK | 0o777)),
    "zip: device": lambda: zipped(zip_special(stat.S_IFCHR | 0o666)),
    "zip: pipe": lambda: zipped(zip_special(stat.S_IFIFO | 0o666)),
    "zip: twice": lambda: zipped(("a.py", FILE), ("a.py", b"other")),
    "zip: twice, other case": lambda: zipped(("a.py", FILE), ("A.py", b"other")),
    "zip: folders in two cases": lambda: zipped(("p/a.py", FILE), ("P/b.py", FILE)),
    "zip: one letter in two forms": lambda: zipped(("\u00e9.py", FILE), ("e\u0301.py", FILE)),
    "zip: a file as folder": lambda: zipped(("a", FILE), ("a/b.py", FILE)),
    "zip: a folder as file": lambda: zipped(("a/b.py", FILE), ("a", FILE)),
    "zip: line end in a name": lambda: zipped(("a\nb.py", FILE)),
    "zip: 2,001 files": lambda: zipped(*many(2001)),
    "zip: bomb": lambda: zipped(("a", b"\0" * (101 << 20))),
    "zip: ratio": lambda: zipped(("a", b"\0" * (4 << 20))),
    "zip: deep": lambda: zipped(("/".join("d" * 17) + "/a", FILE)),
    "zip: another compression": lambda: zipped(("a.py", FILE), how=zipfile.ZIP_BZIP2),
    "zip: a compression that names its memory": lambda: zipped(("a.py", FILE), how=zipfile.ZIP_LZMA),
    "tar: parent": lambda: tar(("../a.py", FILE)),
    "tar: absolute": lambda: tar(("/tmp/a.py", FILE)),
    "tar: symlink": lambda: tar(special(tarfile.SYMTYPE, target="/etc/passwd")),
    "tar: symlink out": lambda: tar(special(tarfile.SYMTYPE, "d", ".."), ("d/a.py", FILE)),
    "tar: hardlink": lambda: tar(special(tarfile.LNKTYPE, target="/etc/passwd")),
    "tar: character device": lambda: tar(special(tarfile.CHRTYPE)),
    "tar: block device": lambda: tar(special(tarfile.BLKTYPE)),
    "tar: pipe": lambda: tar(special(tarfile.FIFOTYPE)),
    "tar: twice": lambda: tar(("a.py", FILE), ("a.py", b"other")),
    "tar: 2,001 files": lambda: tar(*many(2001)),
    "tar: bomb": lambda: tar(("a", b"\0" * (101 << 20))),
    "tar: ratio": lambda: tar(("a", b"\0" * (4 << 20))),
    "tar: a header of gigabytes": lying_header,
}


@pytest.mark.parametrize("animal", ZOO)
def test_a_bad_archive_is_refused_and_leaves_nothing_behind(animal: str, tmp_path: Path):
    with pytest.raises(ArchiveRefused):
        unpack(ZOO[animal](), tmp_path / "below" / "target")
    assert list((tmp_path / "below").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["below"]


@pytest.mark.parametrize("pack", [tar, zipped, lambda *entries: tar(*entries, mode="w")])
def test_a_good_archive_comes_out_as_it_went_in(pack: Callable[..., bytes], tmp_path: Path):
    packed = pack(("world/__init__.py", b""), ("world/a.py", FILE), ("./data/t.json", b"[]"))
    for _ in range(2):  # again: it is there
        unpack(packed, tmp_path / "target")
    files = sorted(path for path in (tmp_path / "target").rglob("*") if path.is_file())
    assert [str(path.relative_to(tmp_path / "target")) for path in files] == [
        *("data/t.json", "world/__init__.py", "world/a.py"),
    ]
    assert (tmp_path / "target" / "world" / "a.py").read_bytes() == FILE
    assert all(path.stat().st_mode & 0o111 == 0 for path in files)


def test_what_is_too_long_packed_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archives, "MAX_PACKED_BYTES", 100)
    with pytest.raises(ArchiveRefused, match="at most 100 bytes"):
        unpack(b"\0" * 101, tmp_path / "target")


@settings(max_examples=300)
@given(place=st.integers(0, 400), value=st.integers(0, 255), kind=st.sampled_from(["zip", "tar", "gz", "bz2", "lzma"]))
def test_a_damaged_archive_is_refused_or_comes_out_below_its_folder(
    place: int, value: int, kind: str, tmp_path_factory: pytest.TempPathFactory
):
    packers = {
        **{"zip": zipped, "gz": tar, "tar": lambda *one: tar(*one, mode="w")},
        **{"bz2": lambda *one: zipped(*one, how=12), "lzma": lambda *one: zipped(*one, how=14)},
    }
    good = packers[kind](("a/b.py", FILE), ("c.py", FILE))
    damaged = bytearray(good)
    damaged[place % len(damaged)] = value
    root = tmp_path_factory.mktemp("fuzz")
    try:
        unpack(bytes(damaged), root / "target")
    except ArchiveRefused:
        assert list(root.iterdir()) == []
    else:
        assert [path.name for path in root.iterdir()] == ["target"]
