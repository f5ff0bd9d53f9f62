"""Keys of the API: their owners, scopes and expiry.

One rule: only the digest of a key is kept. A key is shown once, when it is made; each is a write-once file in the data
directory and so is its revocation, so every API process sees both at its next request, and a lost Redis loses neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_core.log.records import decode_record
from services.files.data_dir import KeysDir
from services.files.durable import make_directory, write_once

SCHEMA = 1
SCOPES = ("jobs:read", "jobs:write", "envs:write", "env:upload", "episodes:read", "episodes:play", "admin")
_KEY = re.compile(r"gspo_([0-9a-z]{12})_([0-9A-Za-z]{43})")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Two changes within one tick of a file system's clock give a directory the same time.
TICK_S = 2.0
_NO_DIGEST = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    id: str
    owner: str
    scopes: tuple[str, ...]
    created_at: str
    expires_at: float | None
    """In seconds since 1970."""
    digest: str = field(repr=False)


class KeyRing:
    """The keys in a directory. ``now``: the time of day, for keys that expire."""

    def __init__(self, directory: KeysDir, now: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._now = now
        self._keys: dict[str, KeyRecord] = {}
        self._was_used = False
        # The time of the directory when it was read, and since when that time is known.
        self._seen: int | None = None
        self._seen_since = 0.0
        self._is_settled = False

    def issue(self, owner: str, scopes: Iterable[str], lifetime_s: float | None = None) -> tuple[KeyRecord, str]:
        """A new key: its record, and the key itself, which is not kept."""
        key_id = "".join(secrets.choice(_ALPHABET[:36]) for _ in range(12))
        secret = "".join(secrets.choice(_ALPHABET) for _ in range(43))
        now = self._now()
        made = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        expires_at = None if lifetime_s is None else now + lifetime_s
        record = KeyRecord(key_id, owner or key_id, tuple(scopes), made, expires_at, _digest(secret))
        make_directory(self._directory.path)
        write_once(self._directory.record(key_id), [json.dumps(asdict(record)).encode()])
        self._seen = None
        return record, f"gspo_{key_id}_{secret}"

    def find(self, presented: str) -> KeyRecord | None:
        """The record of a key that is valid now. An unknown id takes as long as a wrong secret."""
        match = _KEY.fullmatch(presented)
        record = self.valid().get(match[1]) if match else None
        digest = _digest(match[2] if match else presented)
        is_right = hmac.compare_digest(digest, record.digest if record else _NO_DIGEST)
        return record if is_right else None

    def revoke(self, key_id: str) -> bool:
        """Invalidate a key. False: there is no such key."""
        if key_id not in self.valid():
            return False
        with contextlib.suppress(FileExistsError):
            write_once(self._directory.revoked(key_id), [b"{}"])
        self._seen = None
        return True

    def valid(self) -> dict[str, KeyRecord]:
        """Keys by id that are neither revoked nor expired."""
        self._look()
        now = self._now()
        return {one.id: one for one in self._keys.values() if one.expires_at is None or one.expires_at > now}

    def was_used(self) -> bool:
        """Whether a key was ever made here, even if it is revoked by now."""
        self._look()
        return self._was_used

    def _look(self) -> None:
        try:
            changed = self._directory.path.stat().st_mtime_ns
        except FileNotFoundError:
            self._keys, self._was_used, self._seen = {}, False, None
            return
        if changed != self._seen:
            self._seen, self._seen_since, self._is_settled = changed, time.monotonic(), False
        if not self._is_settled:
            # Before reading: later writes give the directory another time.
            self._is_settled = time.monotonic() - self._seen_since > TICK_S
            paths = self._directory.records()
            revoked = self._directory.revoked_ids()
            self._keys = {record.id: record for record in map(_read, paths) if record.id not in revoked}
            self._was_used = bool(paths)


def _read(path: Path) -> KeyRecord:
    record: dict[str, Any] = decode_record(path.read_bytes(), SCHEMA)
    return KeyRecord(**{**record, "scopes": tuple(record["scopes"])})


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
