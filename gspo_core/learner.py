"""Training a policy: batches of sequences in, updated weights and metrics out.

One rule: how a batch is cut into micro-batches and over ranks never changes an update. Micro-batches sum, with
denominators counted over the whole minibatch before any gate. A learner that is interrupted and resumed between two
steps goes on bit for bit as if nothing had happened (same number of threads and ranks, same device).

The loss is `gspo_core.objective`; this module only feeds it. It knows no queue, no version and no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gspo_core import learner_state
from gspo_core.batch import MicroBatch, TrainSequence, collate, plan_micro_batches
from gspo_core.learner_config import LearnerConfig
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.optimizer import Update, apply_update, build_adamw, learning_rate
from gspo_core.policy_model import PolicyModel, load_model
from gspo_core.weights_export import export_model


@dataclasses.dataclass
class Counters:
    """What a learner has done so far; saved with its state."""

    num_steps: int = 0
    num_updates: int = 0
    num_skipped_updates: int = 0
    """Updates that changed nothing because the gradient was not finite."""


class Learner:
    """Holds a policy and its optimizer."""

    def __init__(
        self, model_dir: Path, config: LearnerConfig, objective: ObjectiveConfig, *, seed: int, device: str = "cpu"
    ) -> None:
        self.config = config
        self.objective = objective
        self.counters = Counters()
        self._model_dir = Path(model_dir)
        self._seed = seed
        self._device = torch.device(device)
        self._dtype = _compute_dtype(config, self._device)
        torch.manual_seed(seed)
        model = load_model(self._model_dir, config.layout).to(self._device)
        self._policy = PolicyModel(model, dtype=self._dtype, chunk_tokens=config.logprob_chunk_tokens)
        self._optimizer = build_adamw(self._policy, config.optimizer)

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train on one batch: `objective.minibatches` updates, each on its share of the sequences."""
        raise NotImplementedError

    def supervised_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One update that makes the actions more likely; advantages and behaviour log-probs play no part."""
        num_actions = sum(s.num_actions for s in sequences)
        if not num_actions:
            raise ValueError("a supervised step needs at least one action")
        total = 0.0
        for micro_batch in self._micro_batches(sequences, range(len(sequences))):
            loss = -self._policy(micro_batch).sum() / num_actions
            loss.backward()
            total += float(loss.detach())
        update = self._update()
        self.counters.num_steps += 1
        return {
            "supervised/loss": total,
            "supervised/num_actions": float(num_actions),
            **self._update_metrics([update]),
        }

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Of each token given those before it, at the sequence's temperature; 0 for the first, which has none."""
        results = [np.zeros(s.num_tokens, np.float32) for s in sequences]
        for micro_batch in self._micro_batches(sequences, range(len(sequences)), score_all=True):
            rows = micro_batch.table(self._policy(micro_batch)).cpu().numpy()
            for index, row in zip(micro_batch.indices, rows, strict=True):
                results[index][1:] = row[: sequences[index].num_tokens - 1]
        return results

    def save_weights(self, directory: Path) -> None:
        """A plain Hugging Face directory, in the dtype that this learner computes in."""
        model = self._policy.model
        export_model(model, model.state_dict(), Path(directory), source=self._model_dir, dtype=self._dtype)

    def save_state(self, directory: Path) -> None:
        """All that `load_state` needs to go on exactly; its files are on disk when this returns."""
        tensors = {"random/cpu": torch.get_rng_state()}
        for name, parameter in self._policy.named_parameters():
            tensors[f"parameter/{name}"] = parameter
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        learner_state.write_shard(Path(directory), 0, tensors)
        learner_state.write_manifest(Path(directory), 1, {"counters": dataclasses.asdict(self.counters)})

    @torch.no_grad()
    def load_state(self, directory: Path) -> None:
        """The inverse of `save_state`; refuses a damaged or unfitting state and then leaves this learner as it was."""
        content, tensors = learner_state.read_state(Path(directory), 0, 1)
        for name, parameter in self._policy.named_parameters():
            parameter.copy_(tensors[f"parameter/{name}"])
            moments = {k: tensors.get(f"optimizer/{k}/{name}") for k in ("step", "exp_avg", "exp_avg_sq")}
            if moments["step"] is not None:
                self._optimizer.state[parameter] = {k: v for k, v in moments.items() if v is not None}
        torch.set_rng_state(tensors["random/cpu"])
        self.counters = Counters(**content["counters"])

    def _micro_batches(
        self, sequences: Sequence[TrainSequence], indices: Sequence[int], *, score_all: bool = False
    ) -> Iterator[MicroBatch]:
        lengths = [sequences[index].num_tokens for index in indices]
        (plan,) = plan_micro_batches(lengths, self.config.micro_batch_tokens, layout=self.config.layout)
        for members in plan:
            yield collate(
                sequences,
                [indices[member] for member in members],
                layout=self.config.layout,
                device=self._device,
                score_all=score_all,
            )

    def _update(self) -> Update:
        optimizer = self.config.optimizer
        lr = learning_rate(optimizer, self.counters.num_steps, self.config.total_steps)
        update = apply_update(self._optimizer, lr, optimizer.max_grad_norm)
        self.counters.num_updates += update.applied
        self.counters.num_skipped_updates += not update.applied
        return update

    def _update_metrics(self, updates: Sequence[Update]) -> dict[str, float]:
        norms = [update.grad_norm for update in updates if update.applied]
        return {
            "learner/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "learner/lr": self._optimizer.param_groups[0]["lr"],
            "learner/num_updates": float(len(norms)),
            "learner/num_skipped_updates": float(len(updates) - len(norms)),
        }


def _compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16
