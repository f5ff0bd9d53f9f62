"""The published shapes of the Qwen3 models, as their `config.json` say them."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}


def _dense(hidden: int, layers: int, heads: int, intermediate: int, *, is_tied: bool = False) -> dict[str, Any]:
    return _COMMON | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": is_tied,
    }


QWEN3: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _dense(1024, 28, 16, 3072, is_tied=True),
    "Qwen3-1.7B": _dense(2048, 28, 16, 6144, is_tied=True),
    "Qwen3-4B": _dense(2560, 36, 32, 9728, is_tied=True),
    "Qwen3-8B": _dense(4096, 36, 32, 12_288),
    "Qwen3-14B": _dense(5120, 40, 40, 17_408),
    "Qwen3-32B": _dense(5120, 64, 64, 25_600),
    "Qwen3-30B-A3B": _dense(2048, 48, 32, 6144)
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
