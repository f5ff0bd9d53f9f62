"""The shapes of a model's tensors, from its configuration alone.

One rule: for the families named here the tensors are exactly those that the learner holds (a test compares them, name
by name); any other family is refused rather than guessed. It opens no weights and imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_core.learner_config import LearnerOptions

Shape = tuple[int, ...]


class UnknownShape(ValueError):
    """The family of the model is none whose tensors are known here."""


def share_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row and end of a rank's part, split as in FSDP2: the last ranks may get fewer rows, or none."""
    size = -(-num_rows // num_ranks)
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows)


@dataclass(frozen=True)
class ModelShape:
    """A transformer whose layers are attention and a gated perceptron, or a mixture of them."""

    family: str
    vocabulary: int
    hidden: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    intermediate: int
    num_experts: int
    """0: dense."""
    experts_per_token: int
    expert_intermediate: int
    sparse_layers: frozenset[int]
    is_tied: bool
    has_query_norms: bool
    has_query_biases: bool

    @property
    def queries(self) -> int:
        """Width of all queries of a token together."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.head_dim

    def root(self) -> Mapping[str, Shape]:
        """The tensors outside the layers."""
        tensors = {"model.embed_tokens.weight": (self.vocabulary, self.hidden), "model.norm.weight": (self.hidden,)}
        return tensors if self.is_tied else {**tensors, "lm_head.weight": (self.vocabulary, self.hidden)}

    def layer(self, number: int) -> Mapping[str, Shape]:
        """The tensors of a layer, without its prefix."""
        return dict(self._layer(number))

    def _layer(self, number: int) -> Iterator[tuple[str, Shape]]:
        h, q, k = self.hidden, self.queries, self.keys
        for name, width in (("q", q), ("k", k), ("v", k)):
            yield f"self_attn.{name}_proj.weight", (width, h)
            if self.has_query_biases:
                yield f"self_attn.{name}_proj.bias", (width,)
        yield "self_attn.o_proj.weight", (h, q)
        if self.has_query_norms:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        if number in self.sparse_layers:
            yield "mlp.gate.weight", (self.num_experts, h)
            yield "mlp.experts.gate_up_proj", (self.num_experts, 2 * self.expert_intermediate, h)
            yield "mlp.experts.down_proj", (self.num_experts, h, self.expert_intermediate)
        else:
            yield "mlp.gate_proj.weight", (self.intermediate, h)
            yield "mlp.up_proj.weight", (self.intermediate, h)
            yield "mlp.down_proj.weight", (h, self.intermediate)
        yield "input_layernorm.weight", (h,)
        yield "post_attention_layernorm.weight", (h,)

    def num_active(self) -> int:
        """Parameters that multiply each token, without the embedding."""
        per_layer = [self._active(number) for number in range(self.num_layers)]
        return sum(per_layer) + self.vocabulary * self.hidden

    def _active(self, number: int) -> int:
        tensors = self.layer(number)
        share = self.experts_per_token / self.num_experts if number in self.sparse_layers else 1.0
        return int(sum(math.prod(s) * (share if ".experts." in name else 1) for name, s in tensors.items()))

    def linear_layers(self, number: int) -> list[Shape]:
        """Weights of a layer that low-rank additions are made for by `all-linear`."""
        tensors = self.layer(number)
        return [shape for name, shape in tensors.items() if name.endswith("_proj.weight")]

    def expert_layers(self, number: int) -> list[Shape]:
        """Weights of a layer's experts as if each were linear layers: (experts, rows, columns) of each projection."""
        if number not in self.sparse_layers:
            return []
        inner = (self.num_experts, self.expert_intermediate, self.hidden)
        return [inner, inner, (self.num_experts, self.hidden, self.expert_intermediate)]


FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")


def read_shape(model_dir: Path) -> ModelShape:
    """Raises `UnknownShape`, also for a directory without a readable configuration."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownShape(f"{model_dir}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnknownShape(f"{model_dir}/config.json holds no object")
    return shape_of(config)


def planned_shape(model_dir: Path, options: LearnerOptions) -> ModelShape:
    """The same where the plan knows what computes the model. Raises `UnknownShape`."""
    if options.policy != "transformers":
        raise UnknownShape(f"memory is planned for the policy transformers, not for {options.policy}")
    return read_shape(model_dir)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a `config.json` describes."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnknownShape(f"memory is planned for {', '.join(FAMILIES)}, not for {family}")
    try:
        return _shape(str(family), config)
    except KeyError as error:
        raise UnknownShape(f"the configuration of this {family} lacks {error}") from error


def _shape(family: str, config: Mapping[str, Any]) -> ModelShape:
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    # transformers writes the second name, the models' makers the first
    named = next((name for name in ("num_experts", "num_local_experts") if name in config), "num_experts")
    experts = config[named] if family == "qwen3_moe" else 0
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    sparse = (n for n in range(layers) if experts and n not in dense and (n + 1) % every == 0)
    head_dim = config.get("head_dim") or hidden // heads
    return ModelShape(
        family=family,
        vocabulary=config["vocab_size"],
        hidden=hidden,
        num_layers=layers,
        num_heads=heads,
        num_key_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        expert_intermediate=config["moe_intermediate_size"] if experts else 0,
        sparse_layers=frozenset(sparse),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_query_norms=family.startswith("qwen3"),
        has_query_biases=family == "qwen2" or bool(config.get("attention_bias", False)),
    )
