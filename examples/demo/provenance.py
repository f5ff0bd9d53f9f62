"""Are the recorded log-probs true? Trained tokens, drawn at random from the batch logs, are computed again under the
weights of the very version that is recorded as having sampled them.

It reads files only: the batch logs (what was trained) and the published versions (what sampled). It needs no service.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gspo_core.types import Branch, Segment
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.files.weights import WeightStore

# Engine and trainer differ by the order of float32 additions only.
TOLERANCE = 1e-4
# An engine that computes in bfloat16 rounds every product to 8 bits: so far may a token's log-prob be from float32's.
HALF_TOLERANCE = 0.3


@dataclass(frozen=True)
class Provenance:
    num_tokens: int
    num_equal: int
    largest_difference: float
    num_versions: int

    def __str__(self) -> str:
        return (
            f"{self.num_equal} of {self.num_tokens} random trained tokens, from {self.num_versions} versions, have the "
            f"recorded log-prob under their recorded weights (largest difference {self.largest_difference:.1e})"
        )


def check_provenance(job_dir: JobDir, num_tokens: int, seed: int, *, tolerance: float = TOLERANCE) -> Provenance:
    """Draw ``num_tokens`` trained tokens of a finished job and compare each with a plain forward pass in float32."""
    drawn = _draw(list(_branches(BatchLog(job_dir))), num_tokens, random.Random(seed))
    weights = WeightStore(job_dir)
    found = [
        difference
        for version, tokens in sorted(drawn.items())
        for difference in differences(weights.path(version), tokens)
    ]
    return Provenance(
        num_tokens=len(found),
        num_equal=sum(difference <= tolerance for difference in found),
        largest_difference=max(found),
        num_versions=len(drawn),
    )


def _branches(log: BatchLog) -> Iterator[Branch]:
    for epoch, step in log.steps():
        for group in log.read(epoch, step).groups:
            for trajectory in group:
                yield from trajectory.branches


def _draw(branches: list[Branch], num_tokens: int, random_: random.Random) -> dict[int, list[tuple[Branch, int]]]:
    """Uniform over actions, by the version that sampled each."""
    by_version: dict[int, list[tuple[Branch, int]]] = defaultdict(list)
    chosen = random_.choices(branches, weights=[branch.num_actions for branch in branches], k=num_tokens)
    for branch in chosen:
        position = random_.choice(branch.action_mask.nonzero()[0].tolist())
        by_version[int(branch.versions[position])].append((branch, position))
    return by_version


@torch.inference_mode()
def differences(model_dir: Path, tokens: list[tuple[Branch, int]]) -> Iterator[float]:
    """How far each recorded log-prob is from what these weights say."""
    # Dozens of small models are loaded; a bar for each would say nothing.
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    for branch, positions in _by_branch(tokens):
        ids = torch.tensor(branch.token_ids[: max(positions)].tolist())[None]
        # Logits of these places only: those of a long prompt would not fit into memory.
        found = model(input_ids=ids, logits_to_keep=torch.tensor(positions) - 1).logits[0].float()
        for position, logits in zip(positions, found, strict=True):
            segment = next(s for s, end in _ends(branch) if position < end)
            logprobs = torch.log_softmax(logits / segment.temperature, dim=-1)
            yield abs(float(logprobs[int(branch.token_ids[position])]) - float(branch.behavior_logprobs[position]))


def _by_branch(tokens: list[tuple[Branch, int]]) -> Iterator[tuple[Branch, list[int]]]:
    """A forward pass serves all tokens of a branch."""
    positions: dict[int, list[int]] = defaultdict(list)
    for branch, position in tokens:
        positions[id(branch)].append(position)
    branches = {id(branch): branch for branch, _ in tokens}
    yield from ((branches[key], places) for key, places in positions.items())


def _ends(branch: Branch) -> Iterator[tuple[Segment, int]]:
    end = 0
    for segment in branch.segments:
        end += segment.num_tokens
        yield segment, end
