"""What decides how much memory a learner takes, and the sizes that its plan adds up.

One rule: it counts numbers and names settings; which tensors live when is said elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gspo_core.plan.shapes import ModelShape, Shape

FLOAT, HALF = 4, 2
# Size of the head's float32 output that is held at once; enough rows for the product to run at full speed.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}

# Keys that are gathered from a shared beginning for which a micro-batch gives up the room of one token, as the learner
# fills it (`gspo_core.batch.balance`).
KEYS_PER_TOKEN = 16


def chunk_rows(vocabulary: int, device: str) -> int:
    """Rows of the head's output that are held at once, where a job does not say."""
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (4 * vocabulary))


@dataclass(frozen=True)
class Setting:
    """What decides how much memory a model takes."""

    shape: ModelShape
    num_ranks: int = 1
    context: int = 1
    """Ranks that share each micro-batch."""
    replicas: int = 1
    """Copies of the model, each sharded over its part of the ranks."""
    device: Literal["cpu", "cuda"] = "cuda"
    is_half: bool = True
    """The forward and backward pass is in bfloat16."""
    tokens: int = 16_384
    """That pass through the model at once, on all ranks that share them."""
    is_checkpointed: bool = False
    has_reference: bool = False
    """A frozen second model."""
    lora_rank: int | None = None
    is_base_half: bool = False
    """The frozen base under low-rank additions is kept in bfloat16."""
    chunk_rows: int | None = None
    keeps_attention: bool = False
    """Layers are recomputed but for their attention."""
    has_small_moments: bool = False
    """AdamW's moments of matrices are kept in eight bits."""
    is_offloaded: bool = False
    """Moments are kept in the host's memory."""
    is_fused: bool = False
    """AdamW makes nothing beside what it updates."""
    shares_beginnings: bool = False
    """What sequences begin with is there once, and each gathers its keys."""
    has_expert_additions: bool = False

    @property
    def num_parts(self) -> int:
        """Into how many parts each copy of the model is cut."""
        return max(1, self.num_ranks // self.replicas)

    @property
    def gathering(self) -> int:
        """Buffers as large as what is being gathered: gloo, which serves CPUs, makes one more of its own."""
        if self.num_ranks == 1:
            return 0
        return 2 if self.device == "cpu" else 1

    @property
    def own_tokens(self) -> int:
        """That pass through the model on one rank."""
        return -(-self.tokens // self.context)

    @property
    def key_copies(self) -> int:
        """How often heads of keys are repeated, so that each rank that shares a micro-batch gets one."""
        return math.lcm(self.shape.num_key_heads, self.context) // self.shape.num_key_heads

    @property
    def width(self) -> int:
        """Bytes of a number in the forward and backward pass."""
        return HALF if self.is_half else FLOAT

    @property
    def base_width(self) -> int:
        return HALF if self.lora_rank is not None and self.is_base_half else FLOAT

    @property
    def logit_rows(self) -> int:
        return min(self.own_tokens, self.chunk_rows or chunk_rows(self.shape.vocabulary, self.device))


def size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def all_shapes(model: ModelShape) -> list[Shape]:
    layers = (shape for number in range(model.num_layers) for shape in model.layer(number).values())
    return [*model.root().values(), *layers]


def num_parameters(model: ModelShape) -> int:
    return size(all_shapes(model))


def root_size(model: ModelShape) -> int:
    """Numbers outside the layers."""
    return size(model.root().values())


def layer_size(model: ModelShape) -> int:
    """Numbers of the largest layer."""
    return max(size(model.layer(number).values()) for number in range(model.num_layers))
