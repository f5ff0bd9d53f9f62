"""A Hugging Face causal language model as a function from a micro-batch to the log-probs of its scored tokens.

One rule: results equal the model's own forward pass; loading refuses any model for which they do not. It neither
trains nor reads or writes files.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo_core.batch import Layout, MicroBatch, TrainSequence, collate
from gspo_core.batch.packing import Packing
from gspo_core.bounds import exceeds
from gspo_core.learner.attention import UnsupportedAttention
from gspo_core.learner.compilation import compile_layers
from gspo_core.learner.context import ContextRanks, UnsupportedSplit
from gspo_core.learner.float32 import in_float32
from gspo_core.learner.logprobs import chosen_logprobs
from gspo_core.learner.low_rank import (
    add_in_place,
    add_low_rank,
    draw_additions,
    under_plain_names,
    without_additions,
)
from gspo_core.learner.model_directory import (
    ModelSource,
    attention_advice,
    fill_skeleton,
    make_skeleton,
    open_model,
)
from gspo_core.learner.narrow import compute_in
from gspo_core.learner.policy import Copy, TrainedPolicy, UnsupportedModel
from gspo_core.learner.publishing import Origin, adapter_copy, origin_of, published_adapter_copy, whole_copy
from gspo_core.learner.ranks import Ranks, owners, whole
from gspo_core.learner.recomputation import recompute
from gspo_core.learner.skeleton import Skeleton, take_over
from gspo_core.learner_config import LearnerConfig, LearnerOptions
from gspo_core.plan import chunk_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tolerance between two float32 paths; a wrong scale or a leak between sequences is orders of magnitude larger.
MAX_FORWARD_DIFFERENCE = 1e-3


OPTIONS = frozenset(LearnerOptions.model_fields)
"""The learner's options that this policy knows: all."""

_Extra = dict[str, Packing | ContextRanks]
"""What a model hands on to its attention."""


class PolicyModel(TrainedPolicy):
    """Wraps a causal language model; runs everything in one forward call, as FSDP requires."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        chunk_tokens: int,
        context: ContextRanks | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.ranks = ranks or Ranks(0, 1)
        self.origin: Origin | None = None
        self.dtype = dtype
        self.chunk_tokens = chunk_tokens
        self.context = context

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def forward(self, micro_batch: MicroBatch, *, by_its_own_head: bool = False) -> Tensor:
        """(N,) log-probs in float32 of the scored tokens. `by_its_own_head`: those of a single sequence from the logits
        that the model computes itself."""
        if by_its_own_head:
            return self._by_its_own_head(micro_batch)
        if self.context is not None:
            return self._split(micro_batch, self.context)
        extra: _Extra = {} if micro_batch.packing is None else {"packing": micro_batch.packing}
        hidden = self._hidden(micro_batch.token_ids, micro_batch.positions, micro_batch.rows_N, extra)
        return self._score(hidden, micro_batch.targets_N, micro_batch.temperatures_N)

    def _split(self, micro_batch: MicroBatch, context: ContextRanks) -> Tensor:
        """The same, each rank of `context` computing its part of the tokens."""
        packing, device = micro_batch.packing, micro_batch.token_ids.device
        assert packing is not None, "a job that splits padded rows is refused"
        own, rows = context.own_rows(micro_batch.rows, packing.num_tokens)
        own_N, rows_N = (torch.from_numpy(places).to(device, non_blocking=True) for places in (own, rows))
        token_ids, positions = (context.part(row) for row in (micro_batch.token_ids, micro_batch.positions))
        hidden = self._hidden(token_ids, positions, rows_N, {"packing": packing, "split": context})
        targets_N, temperatures_N = (
            x.index_select(0, own_N) for x in (micro_batch.targets_N, micro_batch.temperatures_N)
        )
        return context.joined(self._score(hidden, targets_N, temperatures_N), own_N, len(micro_batch.rows))

    def _score(self, hidden: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
        return chosen_logprobs(
            hidden, self.head.weight, targets_N, temperatures_N, bias=self.head.bias, chunk_tokens=self.chunk_tokens
        )

    def layers(self) -> list[nn.Module]:
        return _layers(self.model)

    def copy_weights(self) -> Copy:
        assert self.origin is not None
        if self.origin.base is not None:
            return published_adapter_copy(self.model, self.origin, self.origin.base, self.dtype)
        return whole_copy(self.model, self.export_tensors(), self.origin, self.dtype, self.ranks)

    def copy_adapter(self) -> Copy:
        assert self.origin is not None
        return adapter_copy(self.model, self.origin)

    def beneath_additions(self, micro_batch: MicroBatch) -> Tensor:
        return without_additions(self, micro_batch)

    def export_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the parameters and persistent buffers of the plain model under its own names; tied ones
        appear once.

        Every rank must call this. It gathers one tensor at a time and only the owner keeps it, so besides its share a
        rank holds at most one copy of the largest tensor.
        """
        ranks = self.ranks
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

    def _by_its_own_head(self, alone: MicroBatch) -> Tensor:
        extra = {} if alone.packing is None else {"packing": alone.packing}
        output = self.model(input_ids=alone.token_ids, position_ids=alone.positions, use_cache=False, **extra)
        logprobs = torch.log_softmax(output.logits[0].float(), -1)
        chosen: Tensor = logprobs.gather(-1, alone.targets_N[:, None])[:, 0]
        return chosen

    def _hidden(self, token_ids: Tensor, positions: Tensor, rows_N: Tensor, extra: _Extra) -> Tensor:
        """Hidden states of the tokens at `rows_N`."""
        with self._autocast(token_ids.device):
            output = self.model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False, **extra)
            hidden: Tensor = output.last_hidden_state
            return hidden.flatten(0, 1).index_select(0, rows_N).to(self.dtype)

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[torch.autocast | None]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


def load_policy(model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks) -> PolicyModel:
    """Load the model at `model_dir` for training under `config`; each rank reads and holds its rows alone."""
    source, layout, kept = open_model(model_dir), layout_of(config), _kept_dtype(config)
    dtype = compute_dtype(config, device)
    if kept != torch.float32 and dtype == torch.float32:
        raise ValueError("lora.base_dtype: bfloat16 cannot be computed in float32; set learner.dtype to bfloat16")
    skeleton = make_skeleton(source, layout, kept)
    policy = _checked(source, skeleton, config, device, ranks)
    if ranks.num_ranks > 1 and (config.lora is not None or dtype != torch.float32):
        policy = _around(skeleton, make_skeleton(source, layout, kept), policy, config, device, ranks)
    elif config.lora is not None:
        add_low_rank(skeleton.model, config.lora)
    if config.activation_checkpointing:
        _checkpoint_activations(policy.model, keeps_attention=config.activation_checkpointing == "keep_attention")
    policy.dtype = dtype
    policy.origin = origin_of(policy.model, model_dir, config)
    if ranks.num_ranks == 1 and dtype != torch.float32:
        compute_in(policy.model, dtype)
    if config.compile_layers:
        if ranks.num_ranks == 1 and dtype != torch.float32:
            # the hooks that cast weights differ from layer to layer, and each would be compiled anew
            raise UnsupportedModel(
                "learner.compile_layers: one rank compiles in float32 alone; leave it out, or set dtype"
            )
        compile_layers(policy.layers(), device)
    return policy


def _checked(
    source: ModelSource, skeleton: Skeleton, config: LearnerConfig, device: torch.device, ranks: Ranks
) -> PolicyModel:
    """The plain model in float32, sharded and filled, after its forward pass was compared with its own."""
    model = skeleton.model
    chunk_tokens = config.logprob_chunk_tokens or chunk_rows(len(model.get_output_embeddings().weight), device.type)
    policy = PolicyModel(
        model, dtype=torch.float32, chunk_tokens=chunk_tokens, context=ranks.context(device), ranks=ranks
    )
    ranks.shard(policy, policy.layers(), dtype=torch.float32, device=device)
    fill_skeleton(source, skeleton, device)
    try:
        with in_float32(model) if ranks.num_ranks == 1 else contextlib.nullcontext():
            _check_forward(policy, layout_of(config), device)
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{error}: {attention_advice(model)}") from error
    except UnsupportedSplit as error:
        raise UnsupportedModel(str(error)) from error
    ranks.settle(policy)
    return policy


def _around(
    checked: Skeleton, bare: Skeleton, policy: PolicyModel, config: LearnerConfig, device: torch.device, ranks: Ranks
) -> PolicyModel:
    """A second model around the weights of the first: how FSDP computes, and what it shards, is fixed when it wraps."""
    model = bare.model
    dtype = compute_dtype(config, device)
    made = PolicyModel(model, dtype=dtype, chunk_tokens=policy.chunk_tokens, context=policy.context, ranks=ranks)
    layers = made.layers()
    if config.lora is not None:
        with torch.device("meta"):
            add_low_rank(model, config.lora)
    ranks.shard(made, layers, dtype=dtype, device=device)
    take_over(bare, checked)
    if config.lora is not None:
        draw_additions(model, device)
    return made


def layout_of(config: LearnerConfig) -> Layout:
    assert config.layout != "auto", "settled before anything is loaded"
    return config.layout


def _kept_dtype(config: LearnerConfig) -> torch.dtype:
    """How weights are held that nothing trains; those that are trained are always float32."""
    return torch.bfloat16 if config.lora is not None and config.lora.base_dtype == "bfloat16" else torch.float32


def compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """What is sharded, and recomputed, as one piece."""
    names = set(model._no_split_modules)
    # FSDP makes a subclass of each type that it wraps
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def _checkpoint_activations(model: PreTrainedModel, *, keeps_attention: bool = False) -> None:
    recompute(_layers(model), keeps_attention=keeps_attention)


@torch.no_grad()
def _check_forward(policy: PolicyModel, layout: Layout, device: torch.device) -> None:
    """Compare short sequences that share a prefix with the model's own logits for each sequence alone."""
    ids = np.arange(48, dtype=np.int32) % min(48, policy.head.weight.shape[0])
    sequences = [_probe(ids), _probe(np.concatenate([ids[:24], ids[:20]])), _probe(ids[::-1][:40])]
    micro_batch = collate(sequences, range(len(sequences)), layout=layout, score_all=True, device=device)
    table = micro_batch.table(policy(micro_batch))
    for row, sequence in zip(table, sequences, strict=True):
        alone = collate([sequence], [0], layout=layout, score_all=True, device=device)
        logprobs = policy(alone, by_its_own_head=True)
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
