"""The errors of engines. The type of an error tells a caller what to do next; its text is for people.

Rule: every kind of engine raises these and nothing else, whatever words its server uses. They decide nothing.
"""

from __future__ import annotations


class EngineError(Exception):
    """A call to an engine failed."""


class EngineUnavailable(EngineError):
    """No usable answer: unreachable, connection lost, busy, or a server error. Retry, perhaps elsewhere."""


class EngineKeyRefused(EngineUnavailable):
    """The engine asks for another key and did nothing. The text says which setting names it."""


class EngineRejected(EngineError):
    """The engine refused this call and is unchanged. It will refuse the same call again."""


class ContextFull(EngineRejected):
    """The sequence is as long as any that the engine samples, by its own account; nothing was sent."""


class EngineProtocolError(EngineError):
    """The answer breaks the protocol; its tokens must not be used."""


class EngineDirty(EngineError):
    """The engine may hold any weights. Only a full, verified load clears this."""


class NoSuchKind(EngineError):
    """The address names a kind of engine that this release does not know."""
