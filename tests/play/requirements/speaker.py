"""Makes the model of these plays: Qwen3's shape and vocabulary, with weights that are written and not learned.

Rule: what is sampled depends on the last token alone. Behind a prompt and behind a word comes a drawn word, now and
then the end; behind the opening of a call of a named tool comes its rest. So a model of a second's work samples every
token, answers differ, and calls that a request forces can be read.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_core.chat import HermesCodec
from gspo_core.starter.untrained import shape_of
from tests.core.qwen_vocabulary import qwen_vocabulary
from tests.play.run import qwen_codec

if TYPE_CHECKING:
    import torch

CONTEXT_TOKENS = 8192
HIDDEN = 32
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
WORDS = (
    *(" water", " stone", " river", " house", " light", " green", " seven", " north", " paper", " glass", " table"),
    *(" music", " horse", " apple", " bread", " cloud", " dream", " earth", " field", " grass", " heart", " image"),
    *(" judge", " knife", " lemon", " money", " night", " ocean", " piano", " queen", " robot", " sugar", " train"),
    *(" uncle", " voice", " woman", " youth", " world", " actor", " beach", " chair", " daily", " eight", " flame"),
    *(" ghost", " hotel", " index", " joint", " large", " metal", " nurse", " offer", " phone", " quiet", " radio"),
)
END_SHARE = 0.12
"""Of the tokens behind a word."""
LIKELY = 25.0
"""Logits of what may come, beside 0 for all else: together e-6 of what is sampled."""
# How a call of a named tool goes on, token by token, behind its opening.
CALL = ('":', " {", "}}\n", "</tool_call>")


def make(directory: Path) -> None:
    """A model, with the vocabulary."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    codec = qwen_codec()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape_of(codec, CONTEXT_TOKENS, ARCHITECTURE))
    with torch.no_grad():
        for layer in model.model.layers:  # what the layers say is nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        _write(model.model.embed_tokens.weight, model.lm_head.weight, codec)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    GenerationConfig(eos_token_id=list(codec.stop_ids), pad_token_id=codec.stop_ids[1]).save_pretrained(directory)
    shutil.copyfile(qwen_vocabulary() / "tokenizer.json", directory / "tokenizer.json")


def _write(embedding: torch.Tensor, head: torch.Tensor, codec: HermesCodec) -> None:
    """Each state has a dimension of its own: any token, a word, each token of a call."""
    words, call = ([token_of(codec, one) for one in said] for said in (WORDS, CALL))
    end = codec.stop_ids[0]
    one = math.sqrt(HIDDEN)  # what the last norm makes of a single 1
    embedding.zero_()
    head.zero_()
    embedding[:, 0] = 1.0
    states = {1: words, **{2 + place: [token] for place, token in enumerate(call)}}
    for state, tokens in states.items():
        embedding[tokens, 0], embedding[tokens, state] = 0.0, 1.0
    head[words, 0] = head[words, 1] = LIKELY / one
    head[end, 1] = (LIKELY + math.log(len(words) * END_SHARE / (1 - END_SHARE))) / one
    for place, token in enumerate([*call[1:], end]):
        head[token, 2 + place] = LIKELY / one


def token_of(codec: HermesCodec, text: str) -> int:
    ids = codec.tokenizer.encode(text)
    known = codec.tokenizer.token_id(text)
    if len(ids) != 1 and known is None:
        raise ValueError(f"{text!r} is no single token")
    return ids[0] if len(ids) == 1 else int(known or 0)
