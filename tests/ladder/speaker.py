"""A tiny Qwen3 with the real vocabulary that says something: calls of a given tool, and words in between.

Rule: nothing is trained. A matrix of the first layer leads from each token of a sentence to the next one, attention and
the rest are random, so recorded log-probs depend on everything that came before. The sentence is cut into tokens that
are all different, often other ones than a tokenizer would choose: whoever encodes what was sampled gets other ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.core.qwen_vocabulary import qwen_chat_template, qwen_vocabulary

NUM_TOKENS = 151_936
"""Rows of Qwen3's embedding; the vocabulary has 151,669 entries."""
CONTEXT_TOKENS = 65_536
OPENING, CLOSING, END = "<tool_call>", "</tool_call>", "<|im_end|>"
WORDS = "Fine."
BEFORE = "\n"
"""The last token of every prompt: a turn begins behind it."""

HIDDEN = 64
NEURONS = 48
_ARCHITECTURE = {
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
# The lengths of embeddings: a token of a sentence stands out from 152,000 others.
IN_SENTENCE, OTHERS = 4.0, 2.0
PUSH = 24.0
"""How far a token moves the stream towards the next one."""
AIM = 0.58
"""Cosine between where it moves and the next token: about one token in a hundred is another one."""
AIM_OF_SEVERAL = 0.9
ATTENTION = 0.15
"""Of what random attention adds: it changes what is said next and does not drown it."""
OUTSIDE = 0.7
"""Share of the first dimension in tokens of no sentence; it leads to the end of the turn."""


class NotSayable(Exception):
    """The text cannot be cut into tokens that are all different."""


class Sentences(NamedTuple):
    """Tokens of a turn, each one leading to the next; the start leads to the first of each."""

    start: int
    turns: Sequence[Sequence[int]]


def write_speaker(directory: Path, call: str | None, seed: int = 0) -> None:
    """``call``: the JSON of a tool call without spaces. None: only words are said."""
    write_qwen_files(directory)
    sentences = cut(Tokenizer.from_file(str(directory / "tokenizer.json")), call)
    config = qwen3_config(_ARCHITECTURE)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        _teach(model, sentences)
    save_model(model, directory)


def write_qwen_files(directory: Path) -> None:
    """Tokenizer and chat template, as Qwen3 has them."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(qwen_vocabulary() / "tokenizer.json", directory)
    shutil.copy(qwen_chat_template(), directory / "chat_template.jinja")
    special = {"eos_token": END, "pad_token": "<|endoftext|>", "model_max_length": 131_072}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


def qwen3_config(architecture: Mapping[str, object]) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=NUM_TOKENS,
        bos_token_id=151_643,
        eos_token_id=151_645,
        dtype="float32",
        **architecture,
    )


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    GenerationConfig(eos_token_id=[151_645, 151_643], pad_token_id=151_643).save_pretrained(directory)


def cut(tokenizer: Tokenizer, call: str | None) -> Sentences:
    """Raises NotSayable."""
    vocabulary = tokenizer.get_vocab()
    start, end = tokenizer.encode(BEFORE).ids[0], vocabulary[END]
    words = _distinct(WORDS, vocabulary, frozenset({start, end}))
    turns = [[*words, end]]
    if call is not None:
        tags = (vocabulary[OPENING], vocabulary[CLOSING])
        body = _distinct(call, vocabulary, frozenset({start, end, *tags, *words}))
        turns.append([tags[0], *body, tags[1], end])
    return Sentences(start, turns)


def _distinct(text: str, vocabulary: Mapping[str, int], used: frozenset[int]) -> list[int]:
    found = _search(text.replace(" ", "Ġ"), vocabulary, used)
    if found is None:
        raise NotSayable(text)
    return found


def _search(rest: str, vocabulary: Mapping[str, int], used: frozenset[int]) -> list[int] | None:
    """Long tokens first."""
    if not rest:
        return []
    for length in range(len(rest), 0, -1):
        token = vocabulary.get(rest[:length])
        if token is None or token in used:
            continue
        behind = _search(rest[length:], vocabulary, used | {token})
        if behind is not None:
            return [token, *behind]
    return None


def _teach(model: Qwen3ForCausalLM, sentences: Sentences) -> None:
    """One neuron for each token of a sentence, and one for all other tokens."""
    tokens = [sentences.start, *dict.fromkeys(token for turn in sentences.turns for token in turn)]
    assert len(tokens) < min(NEURONS, HIDDEN)
    directions, _ = torch.linalg.qr(torch.randn(HIDDEN - 1, HIDDEN - 1))
    units = {token: torch.cat((torch.zeros(1), row)) for token, row in zip(tokens, directions, strict=False)}
    model.model.embed_tokens.weight.copy_(_embeddings(units))
    leads = {sentences.start: [turn[0] for turn in sentences.turns]}
    leads |= {one: [other] for turn in sentences.turns for one, other in pairwise(turn)}
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(ATTENTION)
    mlp = model.model.layers[0].mlp
    for weight in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight):
        weight.mul_(0.1)
    outside = torch.zeros(HIDDEN).index_fill(0, torch.tensor(0), 1.0)
    ends = [sentences.turns[0][-1]]
    for neuron, (unit, following) in enumerate([(outside, ends), *((units[one], leads[one]) for one in leads)]):
        towards = torch.stack([units[token] for token in following]).sum(0)
        mlp.gate_proj.weight[neuron] = mlp.up_proj.weight[neuron] = unit
        aim = AIM if len(following) == 1 else AIM_OF_SEVERAL
        mlp.down_proj.weight[:, neuron] = PUSH / HIDDEN * _beside(towards / towards.norm(), aim)


def _embeddings(units: Mapping[int, Tensor]) -> Tensor:
    rows = torch.randn(NUM_TOKENS, HIDDEN)
    rows[:, 0] = 0
    rows *= (1 - OUTSIDE**2) ** 0.5 / rows.norm(dim=1, keepdim=True)
    rows[:, 0] = OUTSIDE
    rows *= OTHERS
    for token, unit in units.items():
        rows[token] = IN_SENTENCE * unit
    return rows


def _beside(unit: Tensor, cosine: float) -> Tensor:
    """A direction at that angle to it."""
    other = torch.randn(HIDDEN)
    other -= (other @ unit) * unit
    found: Tensor = cosine * unit + (1 - cosine**2) ** 0.5 * other / other.norm()
    return found
