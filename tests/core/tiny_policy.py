"""A policy that is no transformer: the mean of the embeddings so far, one matrix, and a head. It holds no test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gspo_core.batch import MicroBatch
from gspo_core.learner import Copy, Ranks, TrainedPolicy, UnsupportedModel
from gspo_core.learner_config import LearnerConfig

OPTIONS = frozenset({"layout"})


class TinyPolicy(TrainedPolicy):
    def __init__(self, vocabulary: int, width: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.dtype = ranks, torch.float32
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        embedded = self.embedding(micro_batch.token_ids)
        mean = embedded.cumsum(1) / (micro_batch.positions[..., None] + 1)
        hidden = torch.tanh(self.layer(mean)).flatten(0, 1)[micro_batch.rows_N]
        logits = self.head(hidden) / micro_batch.temperatures_N[:, None]
        return torch.log_softmax(logits, -1).gather(-1, micro_batch.targets_N[:, None])[:, 0]

    def layers(self) -> list[nn.Module]:
        return [self.layer]

    def copy_weights(self) -> Copy:
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}

        def complete(directory: Path) -> None:
            directory.mkdir(parents=True)
            save_file(tensors, directory / "model.safetensors")

        return Copy(lambda _: None, complete)


def load_policy(model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks) -> TinyPolicy:
    if config.layout != "padded":
        raise UnsupportedModel("a tiny policy takes rows side by side: set layout to padded")
    policy = TinyPolicy(**json.loads((model_dir / "config.json").read_text()), ranks=ranks)
    policy.load_state_dict(load_file(model_dir / "model.safetensors"))
    return policy.to(device)


def write_tiny(directory: Path, vocabulary: int, width: int = 12) -> Path:
    directory.mkdir(parents=True)
    torch.manual_seed(0)
    (directory / "config.json").write_text(json.dumps({"vocabulary": vocabulary, "width": width}))
    save_file(TinyPolicy(vocabulary, width, Ranks(0, 1)).state_dict(), directory / "model.safetensors")
    return directory
