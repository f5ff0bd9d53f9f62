"""A Hugging Face causal language model as a function from a micro-batch to the log-probs of its scored tokens.

One rule: what it computes equals the model's own forward pass; a model whose head does more than a matrix product is
found when it is loaded and refused. Weights are read from safetensors only and no code from the model's directory is
run. It neither trains nor saves.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gspo_core.attention import PACKED
from gspo_core.batch import Layout, MicroBatch
from gspo_core.logprobs import chosen_logprobs


class UnsupportedModel(ValueError):
    """The model cannot be trained by this learner."""


def load_model(model_dir: Path, layout: Layout) -> Any:
    """The model at `model_dir` with float32 weights, in evaluation mode: policy and engine use no dropout."""
    if not (model_dir / "config.json").is_file():
        raise UnsupportedModel(f"{model_dir} holds no config.json: it is no Hugging Face model directory")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        attn_implementation=PACKED if layout == "packed" else "sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    if layout == "packed" and not model._supports_attention_backend:
        raise UnsupportedModel(f"{type(model).__name__} brings its own attention: set layout to padded")
    model.config.use_cache = False
    return model.eval()


class PolicyModel(nn.Module):
    """Wraps a causal language model; the whole computation is one forward call, as sharding by FSDP needs."""

    def __init__(self, model: Any, *, dtype: torch.dtype, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """(M,) log-probs in float32 of the scored tokens."""
        with self._autocast(micro_batch.token_ids.device):
            hidden = self._hidden(micro_batch)
        hidden = hidden.flatten(0, 1).index_select(0, micro_batch.rows_N).to(self.dtype)
        return chosen_logprobs(
            hidden,
            self.head.weight,
            micro_batch.targets_N,
            micro_batch.temperatures_N,
            bias=self.head.bias,
            chunk_tokens=self.chunk_tokens,
        )

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        extra = {} if micro_batch.lengths is None else {"packed_lengths": micro_batch.lengths}
        output = self.model.base_model(
            input_ids=micro_batch.token_ids, position_ids=micro_batch.positions, use_cache=False, **extra
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)
