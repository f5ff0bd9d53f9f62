"""Turns sequences into micro-batch tensors: `packing` lays token ids end to end, `collate` adds everything else.

It knows no model and no loss.
"""

from gspo_core.batch.collate import (
    InvalidSequence,
    Layout,
    MicroBatch,
    TrainSequence,
    collate,
    deal_minibatches,
    split_batch,
)

__all__ = [
    "InvalidSequence",
    "Layout",
    "MicroBatch",
    "TrainSequence",
    "collate",
    "deal_minibatches",
    "split_batch",
]
