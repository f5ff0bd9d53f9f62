"""The keys by which agents ask for turns, and those by which their episodes are paid: each names one attempt of one
episode, and proves itself.

Rule: a key is signed with a secret of the installation, so any gateway can check it without a look-up, and nobody can
make one. It opens one attempt until it expires. Who samples cannot make the key that pays. Keys are never logged. Where
the installation lost its secret and has another one, keys of before are still known here, so that what is over is said
to be over.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import NamedTuple

from gspo_core.invariants import InvalidValue
from gspo_core.types import EpisodeKey

PREFIX = "ep_"
PAYING = "rw_"
NEIGHBOUR = "gw_"
# Far longer than an episode may wait and play; what has ended is refused before that.
KEPT_S = 14 * 24 * 3600
_MAC_BYTES = 32
_USES = {PREFIX: b"agent key 2\0", PAYING: b"reward key 1\0", NEIGHBOUR: b"gateway 1\0"}
_MAX_CHARS = 512
# A server that is wiped more often leaves nobody who remembers.
MAX_SECRETS = 4


class AttemptId(NamedTuple):
    """Which play of an episode: a later one is greater. Its number alone would come again after a loss of the queue."""

    epoch: int
    """In which its group was dispatched."""
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.number}"


class UnknownKey(ValueError):
    """Nothing that this installation signed."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a key names."""

    episode: EpisodeKey
    attempt: AttemptId
    expires_at: int
    """Unix seconds."""
    pays: bool = False
    """It is for rewards, and for nothing else."""


class Keys:
    def __init__(self, secret: bytes) -> None:
        self._secrets: tuple[bytes, ...] = ()
        self.renew(secret)

    @property
    def secret(self) -> bytes:
        """With which keys are made."""
        return self._secrets[0]

    def renew(self, secret: bytes) -> None:
        """The secret of the installation, which may be another one than before."""
        if len(secret) < _MAC_BYTES:
            raise ValueError(f"the secret of the keys has {len(secret)} bytes, fewer than {_MAC_BYTES}")
        others = [one for one in self._secrets if one != secret]
        self._secrets = (secret, *others[: MAX_SECRETS - 1])

    def make(self, episode: EpisodeKey, attempt: AttemptId, now: float, more_s: float = 0.0) -> str:
        """``more_s``: how long it is needed after the episode has ended."""
        words = f"{episode}/{attempt}/{int(now + more_s) + KEPT_S}".encode()
        return self._signed(PREFIX, words)

    def paying(self, key: str) -> str:
        """The key that pays the attempt of ``key``. Raises ``UnknownKey``."""
        named = self.read(key)
        return self._signed(PAYING, f"{named.episode}/{named.attempt}/{named.expires_at}".encode())

    def vouch(self, gateway: str) -> str:
        """By this the gateways of an installation know each other's requests from those of agents."""
        return self._signed(NEIGHBOUR, gateway.encode())

    def vouches(self, said: str) -> bool:
        try:
            return said.startswith(NEIGHBOUR) and bool(self._words(said))
        except UnknownKey:
            return False

    def _signed(self, prefix: str, words: bytes) -> str:
        return prefix + base64.urlsafe_b64encode(_mac(self.secret, prefix, words) + words).decode().rstrip("=")

    def read(self, key: str) -> Named:
        """Raises ``UnknownKey``; whether it has expired is for the caller to judge."""
        if not key.startswith((PREFIX, PAYING)):
            raise UnknownKey
        words, pays = self._words(key), key.startswith(PAYING)
        try:
            episode, epoch, number, expires_at = words.decode().rsplit("/", 3)
            return Named(EpisodeKey.parse(episode), AttemptId(int(epoch), int(number)), int(expires_at), pays)
        except (InvalidValue, ValueError):  # of another release
            raise UnknownKey from None

    def _words(self, key: str) -> bytes:
        """What was signed, in one of the known uses. Raises ``UnknownKey``."""
        prefix, body = key[: len(PREFIX)], key[len(PREFIX) :]
        if len(key) > _MAX_CHARS or not body.isascii():
            raise UnknownKey
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise UnknownKey from None
        mac, words = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not any(hmac.compare_digest(mac, _mac(secret, prefix, words)) for secret in self._secrets):
            raise UnknownKey
        return words


def _mac(secret: bytes, prefix: str, words: bytes) -> bytes:
    return hmac.new(secret, _USES[prefix] + words, hashlib.sha256).digest()
