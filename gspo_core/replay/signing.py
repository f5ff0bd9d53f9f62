"""Signatures of files by Ed25519 keys as OpenSSH or PEM writes them.

The rule: the signature is over the bytes of a file and lies beside it, under its name and ``.sig``; the verifier
supplies the public key. The package `cryptography` is needed where something is signed or checked, and nowhere else.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_core.replay.past import PastError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_SSH = b"-----BEGIN OPENSSH"


class BadSignature(PastError):
    """The file is not signed by that key, or the key is none that signs here."""


def signature_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def write_signed(path: Path, data: bytes, key: Path | None) -> None:
    """A new file, and its signature beside it; nothing is written where one of the two cannot be. Without a key: no
    signature. Raises BadSignature, FileExistsError, ModuleNotFoundError."""
    signature = _private(key).sign(data).hex() if key is not None else None
    for one in (path, signature_of(path)) if signature is not None else (path,):
        if one.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(one))
    with path.open("xb") as file:
        file.write(data)
    if signature is not None:
        with signature_of(path).open("x") as beside:
            beside.write(f"{signature}\n")


def check_signature(path: Path, public_key: Path) -> None:
    """Raises BadSignature."""
    from cryptography.exceptions import InvalidSignature

    public = _public(public_key)
    try:
        public.verify(bytes.fromhex(signature_of(path).read_text().strip()), path.read_bytes())
    except FileNotFoundError as error:
        raise BadSignature(f"{error.filename} is not there") from error
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"{path} is not what the holder of {public_key} signed") from error


def _private(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = path.read_bytes()
    load = serialization.load_ssh_private_key if data.startswith(_SSH) else serialization.load_pem_private_key
    try:
        key = load(data, None)
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise BadSignature(f"{path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadSignature(f"{path} is no Ed25519 key")
    return key


def _public(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = path.read_bytes()
    load = serialization.load_ssh_public_key if data.startswith(b"ssh-") else serialization.load_pem_public_key
    try:
        key = load(data)
    except ValueError as error:
        raise BadSignature(f"{path}: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadSignature(f"{path} is no Ed25519 key")
    return key
