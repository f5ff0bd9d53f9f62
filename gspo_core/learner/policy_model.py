"""A Hugging Face causal language model as a function from a micro-batch to the log-probs of its scored tokens.

One rule: results equal the model's own forward pass; loading refuses any model for which they do not. It neither
trains nor reads or writes files.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gspo_core.batch import Layout, MicroBatch, TrainSequence, collate
from gspo_core.bounds import exceeds
from gspo_core.learner.attention import UnsupportedAttention
from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.learner.low_rank import add_in_place, add_low_rank, under_plain_names
from gspo_core.learner.model_directory import UnsupportedModel, attention_advice, load_model
from gspo_core.learner.ranks import Ranks, owners, whole
from gspo_core.learner_config import LearnerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Size of the head's float32 output; enough rows for the product with the head to run at full speed.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
# Tolerance between two float32 paths; a wrong scale or a leak between sequences is orders of magnitude larger.
MAX_FORWARD_DIFFERENCE = 1e-3


class PolicyModel(nn.Module):
    """Wraps a causal language model; runs everything in one forward call, as FSDP requires."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_output_embeddings()
        return head

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

    def export_tensors(self, ranks: Ranks) -> dict[str, Tensor]:
        """This rank's share of the parameters and persistent buffers of the plain model under its own names; tied ones
        appear once.

        Every rank must call this. It gathers one tensor at a time and only the owner keeps it, so besides its share a
        rank holds at most one copy of the largest tensor.
        """
        ranks.settle(self)
        names = dict(self.model.named_parameters(remove_duplicate=False))
        owner = owners({name: value.numel() for name, value in self.model.named_parameters()}, ranks.num_ranks)
        copies: dict[int, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            gathered = whole(parameter.detach())
            if owner[name] == ranks.rank:
                copies[id(parameter)] = gathered.to("cpu", self.dtype, copy=True)
        tensors = {name: copies[id(value)] for name, value in names.items() if id(value) in copies}
        if ranks.is_first:
            tensors |= {name: value for name, value in self.model.state_dict().items() if name not in names}
        add_in_place(tensors, self.model, whole)
        return under_plain_names(tensors)

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        extra = {} if micro_batch.packing is None else {"packing": micro_batch.packing}
        output = self.model.base_model(
            input_ids=micro_batch.token_ids, position_ids=micro_batch.positions, use_cache=False, **extra
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[torch.autocast | None]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def load_policy(model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks) -> PolicyModel:
    """Load the model at `model_dir` for training under `config`, sharded for this rank."""
    model = load_model(model_dir, config.layout).to(device)
    chunk_tokens = config.logprob_chunk_tokens or _chunk_tokens(model, device)
    policy = PolicyModel(model, dtype=torch.float32, chunk_tokens=chunk_tokens)
    try:
        _check_forward(policy, config.layout, device)
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{error}: {attention_advice(model)}") from error
    if config.lora is not None:
        add_low_rank(model, config.lora)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    policy.dtype = _compute_dtype(config, device)
    ranks.shard(policy, _layers(model), dtype=policy.dtype, device=device)
    return policy


def _compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _chunk_tokens(model: PreTrainedModel, device: torch.device) -> int:
    vocabulary = len(model.get_output_embeddings().weight)
    return max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // (4 * vocabulary))


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def _checkpoint_activations(model: PreTrainedModel) -> None:
    for layer in _layers(model):
        if not hasattr(layer, "gradient_checkpointing"):
            raise UnsupportedModel(f"{type(layer).__name__} cannot recompute its activations")
        # set what transformers' own switch sets, since its name varies between releases
        checkpointing: Any = layer
        checkpointing.gradient_checkpointing = True
        checkpointing._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        layer.training = True  # the layer requires it; its submodules stay without dropout


@torch.no_grad()
def _check_forward(policy: PolicyModel, layout: Layout, device: torch.device) -> None:
    """Compare short sequences that share a prefix with the model's own logits for each sequence alone."""
    ids = np.arange(48, dtype=np.int32) % min(48, policy.head.weight.shape[0])
    sequences = [_probe(ids), _probe(np.concatenate([ids[:24], ids[:20]])), _probe(ids[::-1][:40])]
    micro_batch = collate(sequences, range(len(sequences)), layout=layout, score_all=True, device=device)
    table = micro_batch.table(policy(micro_batch))
    for row, sequence in zip(table, sequences, strict=True):
        alone = collate([sequence], [0], layout=layout, score_all=True, device=device)
        extra = {} if alone.packing is None else {"packing": alone.packing}
        output = policy.model(input_ids=alone.token_ids, position_ids=alone.positions, use_cache=False, **extra)
        logprobs = torch.log_softmax(output.logits[0].float(), -1).gather(-1, alone.targets_N[:, None])[:, 0]
        difference = float((row[: len(logprobs)] - logprobs).abs().max())
        if exceeds(difference, MAX_FORWARD_DIFFERENCE):
            raise UnsupportedModel(
                f"log-probs of {type(policy.model).__name__} differ by {difference:.2g} from its own forward pass: "
                f"its head or its attention (layout {layout}) does something that this learner does not know"
            )


def _probe(ids: NDArray[np.int32]) -> TrainSequence:
    size = len(ids)
    zeros, none = np.zeros(size, np.int32), np.zeros(size, np.float32)
    return TrainSequence(ids, np.arange(size) > 0, none, zeros, zeros, advantages=0.0)
