"""Random weights in the shape of Qwen3, small enough to learn on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_core.chat import HermesCodec

if TYPE_CHECKING:
    from transformers import Qwen3Config

ARCHITECTURE: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    # Measured: with the usual 0.02 a model of this width needs about three times as many steps to learn to copy.
    "initializer_range": 0.05,
}


def write_untrained(directory: Path, codec: HermesCodec, seed: int, *, context_tokens: int = 1024) -> int:
    """A randomly initialised model; returns its number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3ForCausalLM

    config = shape_of(codec, context_tokens)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=list(codec.stop_ids), pad_token_id=codec.stop_ids[1]).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def shape_of(codec: HermesCodec, context_tokens: int, architecture: Mapping[str, Any] = ARCHITECTURE) -> Qwen3Config:
    """The configuration of a model that speaks as ``codec`` writes."""
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=codec.tokenizer.vocab_size,
        bos_token_id=None,
        eos_token_id=codec.stop_ids[0],
        pad_token_id=codec.stop_ids[1],
        dtype="float32",
        max_position_embeddings=context_tokens,
        **architecture,
    )
