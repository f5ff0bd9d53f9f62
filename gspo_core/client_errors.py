"""What all errors of the client have in common."""

from __future__ import annotations


class ClientError(Exception):
    """Base of the client's errors."""


class Unreachable(ClientError):
    """Nothing answers at the address, or not to the end, after several tries."""
