"""A Hugging Face causal language model as a function from a micro-batch to the log-probs of its scored tokens.

One rule: what it computes equals the model's own forward pass; a model whose head does more than a matrix product is
found when it is loaded and refused. Weights are read from safetensors only and no code from the model's directory is
run. It neither trains nor saves.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gspo_core.attention import PACKED
from gspo_core.batch import Layout, MicroBatch
from gspo_core.learner_config import LearnerConfig
from gspo_core.logprobs import chosen_logprobs
from gspo_core.ranks import Ranks


class UnsupportedModel(ValueError):
    """The model cannot be trained by this learner."""


class PolicyModel(nn.Module):
    """Wraps a causal language model; the whole computation is one forward call, as sharding by FSDP needs."""

    def __init__(self, model: Any, *, dtype: torch.dtype, chunk_tokens: int, fingerprint: str) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens
        self.fingerprint = fingerprint
        """Tells models apart whose states cannot be exchanged."""

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """(N,) log-probs in float32 of the scored tokens."""
        with self._autocast(micro_batch.token_ids.device):
            hidden = self._hidden(micro_batch).flatten(0, 1).index_select(0, micro_batch.rows_N).to(self.dtype)
        return chosen_logprobs(
            hidden,
            self.head.weight,
            micro_batch.targets_N,
            micro_batch.temperatures_N,
            bias=self.head.bias,
            chunk_tokens=self.chunk_tokens,
        )

    def export_tensors(self, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Parameters and persistent buffers of the model under its own names; tied ones are one tensor."""
        copies: dict[int, Tensor] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for parameter in parameters.values():
            if id(parameter) not in copies:
                copies[id(parameter)] = whole(parameter.detach()).to("cpu", self.dtype)
        tensors = {name: copies[id(parameter)] for name, parameter in parameters.items()}
        buffers = {name: value for name, value in self.model.state_dict().items() if name not in parameters}
        return tensors | buffers

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        extra = {} if micro_batch.packing is None else {"packing": micro_batch.packing}
        output = self.model.base_model(
            input_ids=micro_batch.token_ids, position_ids=micro_batch.positions, use_cache=False, **extra
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def load_policy(model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks) -> PolicyModel:
    """The model at `model_dir`, ready to be trained as `config` says, on this rank's share."""
    model = _load_model(model_dir, config.layout).to(device)
    dtype = _compute_dtype(config, device)
    fingerprint = hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()
    policy = PolicyModel(model, dtype=dtype, chunk_tokens=config.logprob_chunk_tokens, fingerprint=fingerprint)
    ranks.shard(policy, _layers(model), dtype)
    return policy


def _load_model(model_dir: Path, layout: Layout) -> Any:
    """With float32 weights, in evaluation mode: policy and engine use no dropout."""
    if not (model_dir / "config.json").is_file():
        raise UnsupportedModel(f"{model_dir} holds no config.json: it is no Hugging Face model directory")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        attn_implementation="sdpa" if layout == "padded" else PACKED,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    if layout != "padded" and not model._supports_attention_backend:
        raise UnsupportedModel(f"{type(model).__name__} brings its own attention: set layout to padded")
    model.config.use_cache = False
    return model.eval()


def _layers(model: Any) -> list[nn.Module]:
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def _compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16
