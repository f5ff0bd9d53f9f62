"""Training a policy: batches of sequences in, updated weights and metrics out.

One rule: how a batch is cut into micro-batches and over ranks never changes an update. Micro-batches sum, with
denominators counted over the whole minibatch before any gate. A learner interrupted and resumed between two
steps continues bit for bit as if uninterrupted (given the same number of threads and ranks and the same device).

The loss is `gspo_core.objective`; this module only feeds it. It knows no queue, version or clock. Under torchrun
every rank builds the same learner, receives the same batches and returns the same metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.batch import MicroBatch, TrainSequence, deal_minibatches, split_batch
from gspo_core.batch.collate import scored_places
from gspo_core.learner import state
from gspo_core.learner.model_directory import export_share, fingerprint, join_shares
from gspo_core.learner.optimizer import Update, apply_update, build_adamw, learning_rate
from gspo_core.learner.policy_model import PolicyModel, load_policy
from gspo_core.learner.ranks import Ranks
from gspo_core.learner.routing import Routes, RoutingReplay
from gspo_core.learner_config import LearnerConfig
from gspo_core.objective import Alarm, LossStats, loss_alarms, loss_denominators, loss_metrics, policy_loss
from gspo_core.objective_config import ObjectiveConfig


@dataclasses.dataclass
class LearnerCounters:
    """A learner's progress; saved with its state."""

    num_steps: int = 0
    num_updates: int = 0
    num_skipped_updates: int = 0
    """Updates skipped because the gradient was not finite."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A snapshot of the weights or the state; with several ranks, each holds a share.

    Writing needs no other rank and may run in its own thread while the learner continues.
    """

    write_share: Callable[[Path], None]
    """Writes this rank's files to a directory that all ranks share."""
    complete: Callable[[Path], None]
    """Joins the shares; runs on the first rank after every rank has written its own."""

    def write(self, directory: Path) -> None:
        """Write the whole copy; for a single rank only."""
        self.write_share(directory)
        self.complete(directory)


@dataclasses.dataclass
class _Work:
    """A micro-batch with the values computed for it before the first update."""

    micro_batch: MicroBatch
    proximal_BT: Tensor | None = None
    reference_BT: Tensor | None = None
    routes: Routes | None = None


class Learner:
    """Holds a policy and its optimizer."""

    alarms: list[Alarm]
    """Alarms raised by the loss of the last step."""
    trained_logprobs: list[NDArray[np.float32]]
    """For each sequence of the last step, the log-probs of its actions under the weights at the start of its update;
    NaN for untrained sequences."""

    def __init__(
        self, model_dir: Path, config: LearnerConfig, objective: ObjectiveConfig, *, seed: int, device: str = "cpu"
    ) -> None:
        self.config = config
        self.objective = objective
        self.counters = LearnerCounters()
        self.alarms = []
        self.trained_logprobs = []
        self._scored: list[tuple[tuple[int, ...], Tensor]] = []
        """Positions of sequences in the step's batch, and for each a row that starts with its actions' log-probs."""
        self._model_dir = Path(model_dir)
        self._seed = seed
        self._device = torch.device(device)
        self._ranks = Ranks.current()
        torch.manual_seed(seed)  # low-rank additions start at random
        self._policy = load_policy(self._model_dir, config, self._device, self._ranks)
        self._reference = self._load_reference()
        self._routing = self._attach_routing()
        self._optimizer = build_adamw(self._policy, config.optimizer)

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train on one batch: `objective.minibatches` updates, each on its share of the sequences."""
        if not sequences:
            raise ValueError("a batch has at least one sequence")
        shares = deal_minibatches(
            len(sequences), self.objective.minibatches, seed=self._seed, step=self.counters.num_steps
        )
        self._optimizer.zero_grad()  # clears leftovers of a step that failed halfway
        self._scored.clear()
        work = [self._prepare(sequences, share) for share in shares]
        self._score_anchors(work)
        stats = LossStats.zero(self._device)
        updates = []
        for share, pieces in zip(shares, work, strict=True):
            stats = stats + self._accumulate(sequences, share, pieces)
            updates.append(self._update())
        self.counters.num_steps += 1
        self.trained_logprobs = self._gather_scored(sequences)
        stats = LossStats(self._ranks.sum(stats.sums), self._ranks.max(stats.maxima))
        num_judged = len(updates) if self._could_clip(sequences, shares, updates) else 1
        self.alarms = loss_alarms(stats, self.objective, num_updates=num_judged)
        metrics = loss_metrics(stats, self.objective, num_updates=len(updates))
        num_empty = sum(not s.num_actions for s in sequences)
        num_idle = sum(not self._acts(s) for s in sequences) - num_empty
        metrics |= {"gspo/num_empty": float(num_empty), "learner/num_idle_sequences": float(num_idle)}
        return metrics | self._update_metrics(updates)

    def _gather_scored(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Collect scored log-probs from all ranks."""
        starts = np.cumsum([0, *(s.num_actions for s in sequences)])
        flat = torch.zeros(int(starts[-1]), device=self._device)
        for indices, rows in self._scored:
            for index, row in zip(indices, rows, strict=True):
                flat[starts[index] : starts[index + 1]] = row[: sequences[index].num_actions]
        self._scored.clear()
        values = self._ranks.sum(flat).cpu().numpy()
        for sequence, (start, end) in zip(sequences, pairwise(starts), strict=True):
            if not self._acts(sequence):
                values[start:end] = np.nan
        return [values[start:end] for start, end in pairwise(starts)]

    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None:
        """Use new settings from the next step on. Raises ValueError for any that the learner was built from."""
        rate = {name: getattr(config.optimizer, name) for name in ("lr", "min_lr_ratio", "max_grad_norm")}
        optimizer = self.config.optimizer.model_copy(update=rate)
        if config != self.config.model_copy(update={"optimizer": optimizer, "total_steps": config.total_steps}):
            raise ValueError("of the optimizer only lr, min_lr_ratio and max_grad_norm change while a learner lives")
        if bool(objective.kl_coef) != (self._reference is not None):
            raise ValueError(
                "kl_coef cannot be turned on or off while a learner lives: its reference was loaded or not"
            )
        self.config, self.objective = config, objective

    def supervised_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """One update that makes the actions more likely; ignores advantages and behaviour log-probs."""
        num_actions = sum(s.num_actions for s in sequences)
        if not num_actions:
            raise ValueError("a supervised step needs at least one action")
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for micro_batch in self._split(sequences, range(len(sequences))):
            loss = -self._policy(micro_batch).sum() / num_actions
            self._backward(loss)
            total += loss.detach()
        update = self._update()
        self.counters.num_steps += 1
        metrics = {"supervised/loss": float(self._ranks.sum(total)), "supervised/num_actions": float(num_actions)}
        return metrics | self._update_metrics([update])

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False) -> list[NDArray[np.float32]]:
        """Log-prob of each token given its prefix, at the sequence's temperature; 0 for the first token.

        With ``sampled_only`` 0 for every token that the policy did not sample too: the head, which is the larger part
        of the work where a vocabulary is large and prompts are long, then runs for few tokens."""
        places = [scored_places(sequence, score_all=not sampled_only) for sequence in sequences]
        starts = np.cumsum([0, *(s.num_tokens for s in sequences)])
        flat = torch.zeros(int(starts[-1]), device=self._device)
        scored = [index for index, found in enumerate(places) if len(found)]
        for micro_batch in self._split(sequences, scored, score_all=not sampled_only):
            cells = [starts[index] + places[index] for index in micro_batch.indices]
            index_N = torch.from_numpy(np.concatenate([*cells, np.zeros(0, np.int64)])).to(self._device)
            flat[index_N] = self._policy(micro_batch)
        values = self._ranks.sum(flat).cpu().numpy()
        return [values[start:end].copy() for start, end in pairwise(starts)]

    def save_weights(self, directory: Path) -> None:
        """Write a plain Hugging Face directory in the dtype that this learner computes in."""
        self._write(self.copy_weights(), directory)

    def copy_weights(self) -> Copy:
        """A copy of what `save_weights` would write now."""
        policy, ranks = self._policy, self._ranks
        tensors = policy.export_tensors(ranks)

        def write_share(directory: Path) -> None:
            export_share(policy.model, tensors, Path(directory), ranks.rank)

        def complete(directory: Path) -> None:
            join_shares(Path(directory), ranks.num_ranks, source=self._model_dir, dtype=policy.dtype)

        return Copy(write_share, complete)

    def _write(self, copy: Copy, directory: Path) -> None:
        """Write a copy with all ranks."""
        copy.write_share(directory)
        self._ranks.wait()
        if self._ranks.is_first:
            copy.complete(directory)
        self._ranks.wait()

    def save_state(self, directory: Path) -> None:
        """Save everything `load_state` needs to continue exactly; the files are on disk on return.

        Omits untrained weights, which the model directory provides.
        """
        self._write(self.copy_state(), directory)

    def copy_state(self) -> Copy:
        """A copy of what `save_state` would write now."""
        ranks = self._ranks
        ranks.settle(self._policy)
        found = state.training_tensors(self._policy, self._optimizer, self._device)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
        content: state.Content = {
            "counters": dataclasses.asdict(self.counters),
            "model": fingerprint(self._model_dir),
        }
        if self.config.lora is not None:
            content["lora_alpha"] = self.config.lora.alpha

        def write_share(directory: Path) -> None:
            state.write_shard(Path(directory), ranks.rank, tensors)

        def complete(directory: Path) -> None:
            state.write_manifest(Path(directory), ranks.num_ranks, content)

        return Copy(write_share, complete)

    def load_state(self, directory: Path) -> None:
        """The inverse of `save_state`; refuses a damaged or mismatched state and leaves the learner unchanged."""
        self.prepare_state(directory)()

    def prepare_state(self, directory: Path) -> Callable[[], None]:
        """Read and check a state; return a function that loads it. Raises ValueError if it does not fit this rank."""
        content, tensors = state.read_state(Path(directory), self._ranks.rank, self._ranks.num_ranks)
        if content["model"] != fingerprint(self._model_dir):
            raise state.InvalidState(f"{directory} is a state of another model than {self._model_dir}")
        alpha = None if self.config.lora is None else self.config.lora.alpha
        if content.get("lora_alpha", alpha) != alpha:  # shapes reveal rank and layers but not the scale of the sum
            raise state.InvalidState(f"{directory} holds additions of lora.alpha {content['lora_alpha']}, not {alpha}")
        self._ranks.settle(self._policy)
        state.check_fit(self._policy, tensors)

        def load() -> None:
            state.restore_tensors(self._policy, self._optimizer, self._device, tensors)
            self.counters = LearnerCounters(**content["counters"])

        return load

    def close(self) -> None:
        """Does nothing with one rank: its memory is freed with the object."""

    def _load_reference(self) -> PolicyModel | None:
        if not self.objective.kl_coef:
            return None
        plain = self.config.model_copy(update={"lora": None, "activation_checkpointing": False})
        reference = load_policy(self._model_dir, plain, self._device, self._ranks)
        return reference.requires_grad_(False)

    def _attach_routing(self) -> RoutingReplay | None:
        if not self.config.routing_replay:
            return None
        if self.objective.anchor == "behavior" or self.objective.minibatches == 1:
            raise ValueError(
                "routing_replay repeats the experts of the proximal forward pass, which there is with anchor: proximal "
                "and more than one minibatch only"
            )
        return RoutingReplay(self._policy)

    def _split(
        self, sequences: Sequence[TrainSequence], indices: Sequence[int], *, score_all: bool = False
    ) -> list[MicroBatch]:
        return split_batch(
            sequences,
            indices,
            self.config.micro_batch_tokens,
            layout=self.config.layout,
            score_all=score_all,
            rank=self._ranks.rank,
            num_ranks=self._ranks.num_ranks,
            device=self._device,
        )

    def _prepare(self, sequences: Sequence[TrainSequence], share: Sequence[int]) -> list[_Work]:
        """The micro-batches of one update, without sequences that cannot affect it.

        A sequence whose advantages are all 0 has no gradient unless there is a KL term to the reference. It still
        counts in the denominators, but in no statistics.
        """
        acting = [index for index in share if self._acts(sequences[index])]
        return [_Work(micro_batch) for micro_batch in self._split(sequences, acting)]

    def _acts(self, sequence: TrainSequence) -> bool:
        advantages = np.broadcast_to(sequence.advantages, sequence.num_tokens)[sequence.action_mask]
        return bool(advantages.any() or (self.objective.kl_coef and len(advantages)))

    def _could_clip(
        self, sequences: Sequence[TrainSequence], shares: Sequence[Sequence[int]], updates: Sequence[Update]
    ) -> bool:
        """Whether any sequence was trained after the weights moved; otherwise every ratio is rightly 1."""
        moved = [update.applied and update.grad_norm > 0 for update in updates]
        if True not in moved or not self._optimizer.param_groups[0]["lr"]:
            return False
        later = shares[moved.index(True) + 1 :]
        return any(self._acts(sequences[index]) for share in later for index in share)

    @torch.no_grad()
    def _score_anchors(self, work: Sequence[Sequence[_Work]]) -> None:
        """Compute proximal and reference log-probs where needed.

        The first update starts from the proximal policy, so its own log-probs serve.
        """
        for position, pieces in enumerate(work):
            for piece in pieces:
                table = piece.micro_batch.table
                if position and self.objective.anchor == "proximal":
                    with contextlib.nullcontext() if self._routing is None else self._routing.record() as piece.routes:
                        piece.proximal_BT = table(self._policy(piece.micro_batch))
                if self._reference is not None:
                    piece.reference_BT = table(self._reference(piece.micro_batch))

    def _accumulate(
        self, sequences: Sequence[TrainSequence], share: Sequence[int], pieces: Sequence[_Work]
    ) -> LossStats:
        """Sum the gradients of one update."""
        masks = [torch.tensor(sequences[index].action_mask) for index in share]
        num_sequences, num_tokens = loss_denominators(masks, [sequences[index].weight for index in share])
        stats = LossStats.zero(self._device)
        for piece in pieces:
            replaying: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._routing is not None and piece.routes is not None:
                replaying = self._routing.replay(piece.routes)
            with replaying:  # covers the backward pass too, where checkpointing repeats the forward pass
                loss, micro_stats = self._loss(piece, num_sequences, num_tokens)
                self._backward(loss)
            stats = stats + micro_stats
        return stats

    def _loss(self, piece: _Work, num_sequences: float, num_tokens: float) -> tuple[Tensor, LossStats]:
        micro_batch = piece.micro_batch
        policy_N = self._policy(micro_batch)
        if not len(policy_N):  # this rank has no work, but the others wait for its gradients
            return policy_N.sum(), LossStats.zero(self._device)
        policy_BT = micro_batch.table(policy_N)
        self._scored.append((micro_batch.indices, policy_BT.detach().float()))
        return policy_loss(
            self.objective,
            policy_BT,
            micro_batch.action_mask_BT,
            micro_batch.advantages,
            proximal_logprobs_BT=piece.proximal_BT,
            behavior_logprobs_BT=micro_batch.behavior_logprobs_BT,
            reference_logprobs_BT=piece.reference_BT,
            turn_ids_BT=micro_batch.turn_ids_BT,
            staleness_BT=micro_batch.staleness_BT,
            sequence_weights_B=micro_batch.weights_B,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )

    def _backward(self, loss: Tensor) -> None:
        # FSDP averages gradients over ranks, but ours must be summed
        scaled = loss * self._ranks.num_ranks
        scaled.backward()  # type: ignore[no-untyped-call]

    def _update(self) -> Update:
        optimizer = self.config.optimizer
        lr = learning_rate(optimizer, self.counters.num_steps, self.config.total_steps)
        update = apply_update(self._optimizer, lr, optimizer.max_grad_norm)
        self.counters.num_updates += update.applied
        self.counters.num_skipped_updates += not update.applied
        return update

    def _update_metrics(self, updates: Sequence[Update]) -> dict[str, float]:
        norms = [update.grad_norm for update in updates if update.applied]
        metrics = {
            "learner/lr": self._optimizer.param_groups[0]["lr"],
            "learner/num_updates": float(len(norms)),
            "learner/num_skipped_updates": float(len(updates) - len(norms)),
        }
        if norms:
            metrics |= {"learner/grad_norm": float(np.mean(norms)), "learner/grad_norm_max": max(norms)}
        return metrics
