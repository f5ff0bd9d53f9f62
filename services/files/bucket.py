"""A place in an object store, or a folder that stands for one: whole objects by name, written once.

Rule: nothing else of the service talks to an object store. The caller that knows a digest checks what it reads. The
addresses are ``s3://``, ``gs://``, ``az://`` and ``file://``; credentials and endpoints come from the variables that
the stores' own tools read, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, and never from us.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
PIECE_BYTES = 8 << 20


class BucketRefused(Exception):
    """The store cannot be used, or did not do what it was asked; the message says why."""


@dataclass(frozen=True)
class BucketEntry:
    name: str
    size_bytes: int
    written_at: datetime


class Bucket:
    """Names have slashes, like paths. May be used by several threads."""

    def __init__(self, store: ObjectStore, address: str) -> None:
        self._store = store
        self.address = address

    @classmethod
    def at(cls, address: str) -> Bucket:
        """Raises BucketRefused for an address of another kind, or without the package ``obstore``."""
        if urlsplit(address).scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise BucketRefused(f"{address} is the address of no object store: it begins with one of {known}")
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store, from_url
        except ModuleNotFoundError as error:
            raise BucketRefused(f"object stores need the package {error.name}: the extra `bucket` has it") from error
        folder = urlsplit(address).path
        try:
            if address.startswith("file:"):
                Path(folder).mkdir(parents=True, exist_ok=True)
            if address.startswith("s3:") and os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                return cls(S3Store.from_url(address, client_options={"allow_http": True}), address)
            return cls(from_url(address), address)
        except (BaseError, OSError) as error:
            raise BucketRefused(_first_line(address, error)) from error

    def put(self, name: str, pieces: Iterator[bytes] | bytes) -> None:
        import obstore

        with _named(self.address, name):
            is_whole = isinstance(pieces, bytes)
            obstore.put(self._store, name, pieces, chunk_size=PIECE_BYTES, use_multipart=not is_whole)

    def get(self, name: str) -> Iterator[bytes]:
        import obstore

        with _named(self.address, name):
            for piece in obstore.get(self._store, name).stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def entries(self, folder: str) -> Iterator[BucketEntry]:
        import obstore

        with _named(self.address, folder):
            for some in obstore.list(self._store, folder):
                for one in some:
                    yield BucketEntry(one["path"], one["size"], one["last_modified"])

    def remove(self, names: list[str]) -> None:
        import obstore

        if names:
            with _named(self.address, names[0]):
                obstore.delete(self._store, names)


@contextlib.contextmanager
def _named(address: str, name: str) -> Iterator[None]:
    """Turns the store's errors into BucketRefused."""
    from obstore.exceptions import BaseError

    where = f"{address.rstrip('/')}/{name}"
    try:
        yield
    except (BaseError, OSError) as error:
        raise BucketRefused(_first_line(where, error)) from error


def _first_line(where: str, error: BaseException) -> str:
    return f"{where}: {str(error).strip().splitlines()[0]}"
