"""What changed from one version of the weights to the next: the changed elements, by index and difference, bit for bit.

Rule: applied to its base a delta gives the new version exactly, or is refused. It names base and result by label and by
a digest of all tensors, so that one that is lost, doubled, out of order or damaged does not fit. None is written where
shapes changed, and where all deltas since the last version without one would be no smaller than the whole: so following
them never reads more than twice the whole. It knows safetensors and numpy, no model and no engine.

    header length (8 bytes, little-endian)   header (JSON)   for each changed tensor: gaps between indices, differences

Both are compressed: of most elements that a step changes only the last bit moves, up or down.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from gspo_core.versions import EngineLabel, NotALabel
from services.files.job_dir import version_name

FORMAT = 1
DELTA_NAME = "delta.gspo"
LONGEST_CHAIN = 256
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 2**28
# One element of a tensor as an unsigned integer of its size: what is compared and stored are bits, not numbers.
_UNSIGNED: Mapping[str, type[np.unsignedinteger]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
_SKIP = 255
"""In gaps: so many elements are unchanged, and none is named yet."""
# More costs several times the CPU for a few per cent of what is left.
_COMPRESSION = 1

Bits: TypeAlias = NDArray[np.unsignedinteger]
How = Literal["same", "changed", "whole"]


class DeltaRefused(ValueError):
    """The delta is damaged, or does not fit the weights that it is applied to. Nothing was changed."""


class TensorDelta(msgspec.Struct, frozen=True):
    """One tensor of the new version."""

    name: str
    dtype: str
    shape: list[int]
    how: How
    num_changed: int = 0
    num_gaps: int = 0
    gap_bytes: int = 0
    value_bytes: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    base: str
    """Label of the version that it is applied to."""
    label: str
    base_digest: str
    digest: str
    """Over all tensors of the result."""
    body_sha256: str
    chain_bytes: int
    """This body and those of all deltas before it, back to the last version without one."""
    parts: list[TensorDelta]


@dataclass(frozen=True, slots=True)
class Delta:
    header: Header
    _body: memoryview

    def changes(self) -> Iterator[tuple[TensorDelta, NDArray[np.int64] | None, Bits]]:
        """Each changed tensor: the indices of its new elements and what is added to their bits, as whole numbers that
        wrap around; or None and the bits of all. Raises DeltaRefused."""
        position = 0
        for part in self.header.parts:
            gaps = self._body[position : position + part.gap_bytes]
            position += part.gap_bytes
            values = self._body[position : position + part.value_bytes]
            position += part.value_bytes
            kind = _bits_of(part.dtype)
            if part.how == "changed":
                indices = indices_of(np.frombuffer(_inflate(gaps, part.num_gaps), np.uint8))
                yield part, indices, _from_planes(_inflate(values, part.num_changed * kind().itemsize), kind)
            elif part.how == "whole":
                yield part, None, np.frombuffer(values, kind)


@dataclass(frozen=True, slots=True)
class Tensor:
    """As it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits

    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.bits).view(np.uint8).data).hexdigest()


def write_delta(base: Path, base_label: str, directory: Path, label: str) -> bool:
    """Into ``directory``, which holds the version after ``base``; whether one was written."""
    old, new = tensors_in(base), tensors_in(directory)
    if _shapes(old) != _shapes(new):
        return False
    parts, body = _encode(old, new)
    before, whole_bytes = _chain_bytes(base), sum(one.bits.nbytes for one in new.values())
    if before is None or before + len(body) >= whole_bytes:
        return False
    header = Header(
        format=FORMAT,
        base=base_label,
        label=label,
        base_digest=_digest_of_all(old),
        digest=_digest_of_all(new),
        body_sha256=hashlib.sha256(body).hexdigest(),
        chain_bytes=before + len(body),
        parts=parts,
    )
    text = msgspec.json.encode(header)
    (directory / DELTA_NAME).write_bytes(len(text).to_bytes(_LENGTH_BYTES, "little") + text + body)
    return True


def _chain_bytes(base: Path) -> int | None:
    """None: unknown, its delta is damaged."""
    try:
        return _read_header(base / DELTA_NAME).chain_bytes
    except FileNotFoundError:
        return 0
    except DeltaRefused:
        return None


def read_delta(directory: Path) -> Delta:
    """The delta of the version in ``directory``. Raises DeltaRefused: there is none, or it is damaged."""
    path = directory / DELTA_NAME
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DeltaRefused(f"{path} cannot be read: {error.strerror}") from error
    header, start = _header(path, data)
    body = data[start:]
    if sum(part.gap_bytes + part.value_bytes for part in header.parts) != len(body):
        raise DeltaRefused(f"{path} has {len(body)} bytes of changes, not as many as its header says")
    if hashlib.sha256(body).hexdigest() != header.body_sha256:
        raise DeltaRefused(f"{path} is damaged: its digest is another one")
    return Delta(header, body)


def chain_to(directory: Path, base: str) -> list[Path] | None:
    """The versions whose deltas lead from ``base`` to the one in ``directory``, in order; None: there is no such chain,
    or it is no smaller than the whole."""
    chain: list[Path] = []
    num_bytes, whole_bytes = 0, sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    while len(chain) < LONGEST_CHAIN:
        path = directory / DELTA_NAME
        try:
            header = _read_header(path)
            num_bytes += path.stat().st_size
            before = EngineLabel.parse(header.base).version
        except (OSError, DeltaRefused, NotALabel):
            return None
        chain.insert(0, directory)
        if num_bytes >= whole_bytes:
            return None
        if header.base == base:
            return chain
        directory = directory.with_name(version_name(before))
    return None


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """By name, mapped into memory, of all safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
        start = _LENGTH_BYTES + length
        for name, said in json.loads(raw[_LENGTH_BYTES:start].tobytes()).items():
            if name != "__metadata__":
                first, end = said["data_offsets"]
                bits = raw[start + first : start + end].view(_bits_of(said["dtype"]))
                found[name] = Tensor(said["dtype"], tuple(said["shape"]), bits)
    return found


def digest_of(tensors: Mapping[str, tuple[str, Sequence[int], str]]) -> str:
    """SHA-256 over each tensor's name, dtype, shape and SHA-256 of its bits."""
    described = [[name, dtype, list(shape), sha256] for name, (dtype, shape, sha256) in sorted(tensors.items())]
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


def digest_in(directory: Path) -> str:
    return _digest_of_all(tensors_in(directory))


def _digest_of_all(tensors: Mapping[str, Tensor]) -> str:
    return digest_of({name: (one.dtype, one.shape, one.sha256()) for name, one in tensors.items()})


def gaps_of(indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """One byte for each rising index: the number of elements left out before it; 255 leaves out 255 and names none."""
    gaps = np.diff(indices, prepend=-1) - 1
    ends = np.cumsum(gaps // _SKIP + 1) - 1
    encoded = np.full(int(ends[-1]) + 1 if len(ends) else 0, _SKIP, np.uint8)
    encoded[ends] = gaps % _SKIP
    return encoded


def indices_of(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    names_one = gaps != _SKIP
    return np.asarray(np.cumsum(gaps.astype(np.int64) + names_one)[names_one] - 1, np.int64)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def _encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> tuple[list[TensorDelta], bytes]:
    parts: list[TensorDelta] = []
    body: list[bytes] = []
    for name, one in new.items():
        indices = np.flatnonzero(old[name].bits != one.bits)
        part, pieces = TensorDelta(name, one.dtype, list(one.shape), "same"), (b"", b"")
        if len(indices):
            gaps = gaps_of(indices)
            differences = one.bits[indices] - old[name].bits[indices]
            pieces = _deflate(gaps.tobytes()), _deflate(_planes(differences))
            sizes = len(indices), len(gaps), len(pieces[0]), len(pieces[1])
            part = TensorDelta(name, one.dtype, list(one.shape), "changed", *sizes)
            if part.gap_bytes + part.value_bytes >= one.bits.nbytes:
                pieces = b"", one.bits.tobytes()
                part = TensorDelta(name, one.dtype, list(one.shape), "whole", value_bytes=one.bits.nbytes)
        body += pieces
        parts.append(part)
    return parts, b"".join(body)


def _planes(values: Bits) -> bytes:
    """All first bytes, all second ones and so on: the high ones of small differences are alike."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T).tobytes()


def _from_planes(data: bytes, kind: type[np.unsignedinteger]) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(kind().itemsize, -1)
    return np.ascontiguousarray(planes.T).view(kind).reshape(-1)


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data, _COMPRESSION)


def _inflate(data: memoryview, num_bytes: int) -> bytes:
    """To exactly so many bytes."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise DeltaRefused(f"changes of the delta are damaged: {error}") from error
    if len(found) != num_bytes or not unpacking.eof:
        raise DeltaRefused("changes of the delta are not as long as its header says")
    return found


def _read_header(path: Path) -> Header:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(min(length, _MAX_HEADER_BYTES))
    return _header(path, memoryview(length.to_bytes(_LENGTH_BYTES, "little") + text))[0]


def _header(path: Path, data: memoryview) -> tuple[Header, int]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(data) < end or length > _MAX_HEADER_BYTES:
        raise DeltaRefused(f"{path} is cut off")
    try:
        header = msgspec.json.decode(data[_LENGTH_BYTES:end], type=Header)
    except msgspec.DecodeError as error:
        raise DeltaRefused(f"{path} is damaged: {error}") from error
    if header.format != FORMAT:
        raise DeltaRefused(f"{path} has format {header.format}; this process reads {FORMAT}")
    return header, end


def _bits_of(dtype: str) -> type[np.unsignedinteger]:
    return _UNSIGNED.get(dtype, np.uint8)
