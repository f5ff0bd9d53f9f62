"""The API keys of judges: of the operator, named by jobs, each sent to its own host alone.

Rule: a job holds the name of a key and chooses the URL, so a key that went to any URL would be anybody's. It is sent to
the host that the operator wrote beside it, and to nothing else; it is in no record and no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import SecretStr

_PORTS = {"https": 443, "http": 80}


class NoKey(ValueError):
    """The text says what to change."""


@dataclass(frozen=True, slots=True)
class _Key:
    host: str
    secret: SecretStr


class JudgeKeys:
    """``texts``: ``NAME@HOST[:PORT]=KEY`` each, as the setting has them."""

    def __init__(self, texts: Iterable[SecretStr] = ()) -> None:
        self._keys: Mapping[str, _Key] = dict(map(_parsed, texts))

    def headers(self, name: str | None, url: str) -> dict[str, str]:
        """What proves to ``url`` who asks. Raises ``NoKey``."""
        if name is None:
            return {}
        key = self._keys.get(name)
        if key is None:
            raise NoKey(f"agent.judge.key: the gateway has no key {name} (GSPO_JUDGE_KEYS)")
        if key.host not in _names_of(url):
            raise NoKey(f"agent.judge.key: {name} is for {key.host}, and not for {max(_names_of(url), key=len)}")
        return {"Authorization": f"Bearer {key.secret.get_secret_value()}"}


def _parsed(text: SecretStr) -> tuple[str, _Key]:
    place, _, secret = text.get_secret_value().partition("=")
    name, _, host = place.partition("@")
    return name, _Key(host.lower(), SecretStr(secret))


def _names_of(url: str) -> set[str]:
    """How the host of a URL may be written: with its port, and without where it is that of the scheme."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = parts.port or _PORTS.get(parts.scheme, 0)
    return {f"{host}:{port}"} | ({host} if port == _PORTS.get(parts.scheme) else set())
