"""``python -m tests.chaos.model DIR [DIR]``: a model so small that a step of it takes some ten milliseconds, and one
like it whose configuration names a dropout, which neither policy nor engine may use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers.utils import logging as transformers_logging

from tests.chaos.talk import CONTEXT_TOKENS, VOCABULARY, write_tokenizer

PLAIN, WITH_DROPOUT = "model", "model-dropout"
DROPOUT = 0.3


def write_model(directory: Path, dropout: float = 0.0) -> None:
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.2,
        attention_dropout=dropout,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == VOCABULARY


if __name__ == "__main__":
    for place, dropout in zip(sys.argv[1:], (0.0, DROPOUT), strict=False):
        write_model(Path(place), dropout)
