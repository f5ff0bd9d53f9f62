"""A part of a job's past as one file: what a replay needs, each file with its sha256, openable with the library alone.

The rule: a bundle is believed only after every byte of it is checked, and what differs is named. The base model is
named by the digests of its files and not carried; the user who opens a bundle supplies it.

A bundle is a zip archive without compression: ``bundle.json``, then the files of the job under their names in its
directory (``gspo_core.log.layout``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypedDict

from gspo_core.log import layout
from gspo_core.replay.past import Past, PastError, digests

FORMAT = 1
MANIFEST = "bundle.json"
# A date that every zip can hold: the same past gives the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MODEL_FILES = ("*.safetensors", "config.json", "*.safetensors.index.json")


class BadBundle(PastError):
    """The file is no bundle, or was changed since it was written; the message names the difference."""


class BundleManifest(TypedDict):
    format: int
    job: str
    first: int
    last: int
    model: dict[str, str]
    """sha256 of each file of the base model that training reads."""
    files: dict[str, str]
    """sha256 of each file of the bundle."""


@dataclass(frozen=True, slots=True)
class Opened:
    manifest: BundleManifest
    sha256: str
    """Over the whole bundle."""


def write_bundle(past: Past, job: str, first: int, last: int, target: Path) -> BundleManifest:
    """Everything that it takes to train the steps ``first`` to ``last`` again, whole under its name or not there.
    Raises PastError, FileExistsError, BlockingIOError while another process writes it."""
    try:
        return _write(past, job, first, last, target)
    except FileNotFoundError as error:
        if target.parent.is_dir() and past.folder.is_dir():  # the job runs, and keeps no more than it has to
            raise PastError(f"{error.filename} was removed just now: ask again") from error
        raise


def _write(past: Past, job: str, first: int, last: int, target: Path) -> BundleManifest:
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    names = sorted(_names(past, first, last))
    manifest: BundleManifest = {
        "format": FORMAT,
        "job": job,
        "first": first,
        "last": last,
        "model": model_digests(Path(past.spec.model)),
        "files": {name: _sha256((past.folder / name).read_bytes()) for name in names},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    with _becoming(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), text)
        for name in names:
            content = (past.folder / name).read_bytes()
            if _sha256(content) != manifest["files"][name]:
                raise PastError(f"{name} was replaced just now: ask again")
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
    return manifest


@contextlib.contextmanager
def _becoming(target: Path) -> Iterator[BinaryIO]:
    """A file to fill, which gets its name once it is on disk and never replaces another. One that a process left when
    it was killed is filled anew; one that is being filled raises BlockingIOError."""
    partial = target.with_name(f".{target.name}.part")
    with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            _name(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def _name(source: Path, target: Path) -> None:
    """Raises FileExistsError."""
    try:
        os.link(source, target)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a disk without links
        source.rename(target)


def _names(past: Past, first: int, last: int) -> Iterator[str]:
    start, way = past.way_to(first - 1)
    yield layout.ACCEPTED
    yield from past.fork_record_names()
    if start is not None:
        place = f"{layout.CHECKPOINTS}/{layout.step_name(start)}"
        yield from (f"{place}/{name}" for name in digests(past.folder / place))
        (past.folder / place).stat()  # it is renamed before it is removed: under its name still, it was listed whole
    elif past.origin is not None:
        yield from (f"{layout.ORIGIN}/{name}" for name in digests(past.origin.folder))
    for step in [*way, *range(first, last + 1)]:
        past.whole_batch(step)  # or refused by name
        yield past.batch_name(step)
    for step in range(first, last + 1):
        yield from (f"{layout.VERSIONS}/{layout.numbered_name(one.version)}" for one in past.published(step))


def model_digests(model: Path) -> dict[str, str]:
    """Raises PastError where there is no model."""
    paths = sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern)})
    if not paths:
        raise PastError(f"there is no model in {model}")
    return {path.name: _sha256(path.read_bytes()) for path in paths}


def check_model(manifest: BundleManifest, model: Path) -> None:
    """Raises BadBundle naming the files of the base model that differ."""
    found = model_digests(model)
    differing = sorted(name for name in manifest["model"] if found.get(name) != manifest["model"][name])
    if differing:
        raise BadBundle(f"{model} is another base model than the bundle's: {', '.join(differing)}")


def unpack(bundle: Path, target: Path) -> Opened:
    """Check a bundle and write its files below ``target``. Raises BadBundle."""
    data = bundle.read_bytes()
    try:
        with zipfile.ZipFile(bundle) as archive:
            _require_stored(archive)
            manifest = _manifest(archive)
            files = {name: archive.read(name) for name in archive.namelist() if name != MANIFEST}
    except BadBundle:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        raise BadBundle(f"{bundle}: {error}") from error
    _check_files(bundle, manifest, files)
    if data != b"".join(_bytes_of(manifest, files)):
        raise BadBundle(f"{bundle}: the archive around the files is not as it was written")
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Opened(manifest, _sha256(data))


def _check_files(bundle: Path, manifest: BundleManifest, files: Mapping[str, bytes]) -> None:
    expected = manifest["files"]
    odd = sorted(expected.keys() ^ files.keys())
    if odd:
        raise BadBundle(f"{bundle}: {', '.join(odd)}: named in {MANIFEST} or there, and not both")
    for name, content in files.items():
        if not _is_inside(name):
            raise BadBundle(f"{bundle}: {name} leads out of it")
        if _sha256(content) != expected[name]:
            raise BadBundle(f"{bundle}: {name} is not what was written")


def _require_stored(archive: zipfile.ZipFile) -> None:
    """What decompresses raises errors of its own kinds, and a bundle needs none of it."""
    if packed := [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]:
        raise BadBundle(f"{archive.filename}: {', '.join(packed)}: said to be compressed, which nothing in a bundle is")


def _manifest(archive: zipfile.ZipFile) -> BundleManifest:
    try:
        manifest: BundleManifest = json.loads(archive.read(MANIFEST))
        number, _ = manifest["format"], (manifest["files"], manifest["model"], manifest["first"], manifest["last"])
    except (KeyError, ValueError, TypeError) as error:
        raise BadBundle(f"{archive.filename}: {MANIFEST}: {type(error).__name__}: {error}") from error
    if number != FORMAT:
        raise BadBundle(f"{archive.filename}: {MANIFEST}: format {number}, this release reads {FORMAT}")
    return manifest


def _bytes_of(manifest: BundleManifest, files: Mapping[str, bytes]) -> Sequence[bytes]:
    """The archive that these files make: a bundle has one spelling."""
    import io

    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), json.dumps(manifest, indent=1, sort_keys=True).encode())
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), files[name])
    return [found.getvalue()]


def _is_inside(name: str) -> bool:
    return {"", ".", ".."}.isdisjoint(name.split("/")) and "\\" not in name and ":" not in name


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
