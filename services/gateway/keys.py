"""The keys by which agents ask for turns: each names one attempt of one episode, and proves itself.

Rule: a key is signed with a secret of the installation, so any gateway can check it without a look-up, and nobody can
make one. It opens one attempt until it expires. Keys are never logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass

from gspo_core.types import EpisodeKey, InvalidValue

PREFIX = "ep_"
# Far longer than an episode may wait and play; what has ended is refused before that.
KEPT_S = 14 * 24 * 3600
_MAC_BYTES = 32
_MAX_CHARS = 512


class UnknownKey(ValueError):
    """Nothing that this installation signed."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a key names."""

    episode: EpisodeKey
    attempt: int
    expires_at: int
    """Unix seconds."""


class Keys:
    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MAC_BYTES:
            raise ValueError(f"the secret of the keys has {len(secret)} bytes, fewer than {_MAC_BYTES}")
        self._secret = secret

    def make(self, episode: EpisodeKey, attempt: int, now: float) -> str:
        words = f"{episode}/{attempt}/{int(now) + KEPT_S}".encode()
        return PREFIX + base64.urlsafe_b64encode(self._mac(words) + words).decode().rstrip("=")

    def read(self, key: str) -> Named:
        """Raises ``UnknownKey``; whether it has expired is for the caller to judge."""
        body = key.removeprefix(PREFIX)
        if body == key or len(key) > _MAX_CHARS or not body.isascii():
            raise UnknownKey
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise UnknownKey from None
        mac, words = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(words)):
            raise UnknownKey
        try:
            episode, attempt, expires_at = words.decode().rsplit("/", 2)
            return Named(EpisodeKey.parse(episode), int(attempt), int(expires_at))
        except (InvalidValue, ValueError):  # of another release
            raise UnknownKey from None

    def _mac(self, words: bytes) -> bytes:
        return hmac.new(self._secret, b"agent key 1\0" + words, hashlib.sha256).digest()
