"""The part of a model's tokenizer that chat codecs need.

Rule: text never becomes a control token, whatever it spells; callers request control tokens by id. Every token added
to the vocabulary is one, whether or not the tokenizer calls it special: Qwen's ``<tool_call>`` and ``<think>`` are not
special, and a web page that spells them must not close a tool's result. Added tokens of only white space are ordinary
text.
It loads ``tokenizer.json`` with the `tokenizers` library and no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

# The text between control tokens recurs in every turn, and a task's in every episode of its group.
_SHORT_CHARS, _NUM_SHORT = 32, 1024
_LONG_CHARS, _NUM_LONG = 4096, 256


class UnsuitableTokenizer(ValueError):
    """This codec cannot use the tokenizer or its files."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added; text never becomes a control token, whatever it spells."""
        ...

    def encode_whole(self, text: str) -> list[int]:
        """Ids of text whose spelled-out control tokens are meant as such."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included; damaged UTF-8 becomes U+FFFD."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of the token spelled exactly so, or None."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The spellings of the control tokens."""
        ...


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer of a model directory (``tokenizer.json``)."""
    return _FileTokenizer(Path(model_dir) / "tokenizer.json")


def require_token(tokenizer: Tokenizer, token: str, what: str) -> int:
    """The id of a token that ``what`` requires."""
    found = tokenizer.token_id(token)
    if found is None:
        raise UnsuitableTokenizer(f"the tokenizer has no token {token}, which {what} is made of")
    return found


class _FileTokenizer:
    def __init__(self, path: Path) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise UnsuitableTokenizer(f"{path} does not exist; a model directory holds its tokenizer in this file")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library knows no other type
            raise UnsuitableTokenizer(f"{path} cannot be read: {error}") from None
        added = self._backend.get_added_tokens_decoder().values()
        control = [token for token in added if token.content.strip()]
        self.control_tokens = tuple(token.content for token in control)
        # The backend can read only special tokens as text, so make all added tokens special.
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        self._backend.add_special_tokens(
            [
                AddedToken(token.content, special=True, **{flag: getattr(token, flag) for flag in flags})
                for token in control
            ]
        )
        self._backend.encode_special_tokens = True
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._encode_short = lru_cache(maxsize=_NUM_SHORT)(self._encode)
        # Packed: a list of numbers takes ten times as much.
        self._encode_long = lru_cache(maxsize=_NUM_LONG)(lambda text: array("i", self._encode(text)))

    def encode(self, text: str) -> list[int]:
        if len(text) > _LONG_CHARS:
            return self._encode(text)
        return list(self._encode_short(text)) if len(text) <= _SHORT_CHARS else self._encode_long(text).tolist()

    def _encode(self, text: str) -> list[int]:
        # A policy can write half a surrogate pair as a JSON escape, which has no bytes.
        sound = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
        if len(text) > _LONG_CHARS:  # other threads go on meanwhile
            [found] = self._backend.encode_batch_fast([sound], add_special_tokens=False)
        else:
            found = self._backend.encode(sound, add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    def encode_whole(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = False
        try:
            return self._encode(text)
        finally:
            self._backend.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found
