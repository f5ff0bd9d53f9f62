"""Training a policy: batches of sequences in, updated weights and metrics out.

One rule: how a batch is cut into micro-batches and over ranks never changes an update. Micro-batches sum, with
denominators counted over the whole minibatch before any gate. A learner interrupted and resumed between two
steps continues bit for bit as if uninterrupted (given the same number of threads and ranks and the same device).

The loss is `gspo_core.objective`; this module only feeds it. It knows no queue and no clock; a logged
batch brings the ages of its tokens. Under torchrun every rank builds the same learner, receives the same batches and
returns the same metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.batch import MicroBatch, TrainSequence, deal_minibatches, split_batch
from gspo_core.batch.collate import scored_places
from gspo_core.learner import state
from gspo_core.learner.batch_view import BatchView, signal_share, teaches
from gspo_core.learner.fitting import settled
from gspo_core.learner.optimizer import Update, apply_update, build_adamw, learning_rate
from gspo_core.learner.policy import Copy, load_policy
from gspo_core.learner.ranks import Ranks
from gspo_core.learner.routing import Routes, RoutingReplay
from gspo_core.learner.trust_region import StepStart, hold_step, mean_k3
from gspo_core.learner_config import LIVE_RATES, LearnerConfig
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.steps import logged_sequences
from gspo_core.objective import (
    Alarm,
    Checks,
    LossStats,
    SpreadMemory,
    TokenTerms,
    collected,
    loss_alarms,
    loss_denominators,
    loss_metrics,
    policy_loss,
    widened_clip,
)
from gspo_core.objective.batch_bounds import batch_bounds, effective_share, looks_at_batch
from gspo_core.objective_config import ObjectiveConfig


@dataclasses.dataclass
class LearnerCounters:
    """A learner's progress; saved with its state."""

    num_steps: int = 0
    num_updates: int = 0
    num_skipped_updates: int = 0
    """Updates skipped because the gradient was not finite."""


@dataclasses.dataclass
class _Work:
    """A micro-batch with the values computed for it before the first update."""

    micro_batch: MicroBatch
    proximal_BT: Tensor | None = None
    reference_BT: Tensor | None = None
    routes: Routes | None = None


Tell = Callable[[tuple[int, ...], TokenTerms], None]
"""Given the positions of a micro-batch's sequences in the batch, and the terms of their actions side by side."""


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
        self._spreads = SpreadMemory()
        self._tell: Tell | None = None
        self._scored: list[tuple[tuple[int, ...], Tensor]] = []
        """Positions of sequences in the step's batch, and for each a row that starts with its actions' log-probs."""
        self._model_dir = Path(model_dir)
        self._seed = seed
        self._device = torch.device(device)
        self._ranks = Ranks.current().arranged(config)
        self._settled = settled(
            self._model_dir, config, self._device, self._ranks, has_reference=bool(objective.kl_coef)
        )
        torch.manual_seed(seed)  # low-rank additions start at random
        self._policy = load_policy(self._model_dir, self._settled, self._device, self._ranks)
        self._reference = self._load_reference()
        self._routing = self._attach_routing()
        self._optimizer = build_adamw(
            self._policy,
            config.optimizer,
            is_fused=config.fused_optimizer,
            on_host=self._settled.offload_moments is True,
        )

    def logged_step(self, batch: LoggedBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Train on a batch as it was logged; also returns what was made of it. Raises ErasedStep."""
        train = logged_sequences(batch, self.objective.advantage)
        return train, self.step(train.sequences)

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train on one batch: `objective.minibatches` updates, each on its share of the sequences."""
        if not sequences:
            raise ValueError("a batch has at least one sequence")
        shares = deal_minibatches(
            [sequence.group for sequence in sequences],
            self.objective.minibatches,
            seed=self._seed,
            step=self.counters.num_steps,
        )
        self._optimizer.zero_grad()  # clears leftovers of a step that failed halfway
        self._scored.clear()
        work = [self._prepare(sequences, share) for share in shares]
        view = self._view(sequences)
        self._score_anchors(work)
        stats = LossStats.zero(self._device)
        updates = []
        for share, pieces in zip(shares, work, strict=True):
            with collected() as checks:
                stats = stats + self._accumulate(sequences, share, pieces, view)
            updates.append(self._update(view.rate_share, checks))
        judged = self._hold(sequences, view)
        self.counters.num_steps += 1
        self.trained_logprobs = self._gather_scored(sequences)
        stats = LossStats(self._ranks.sum(stats.sums), self._ranks.max(stats.maxima))
        num_judged = len(updates) if self._could_clip(sequences, shares, updates) else 1
        self.alarms = loss_alarms(stats, self.objective, num_updates=num_judged)
        metrics = loss_metrics(stats, self.objective, num_updates=len(updates))
        self._remember(metrics, was_moved=num_judged > 1)
        num_empty = sum(not s.num_actions for s in sequences)
        num_idle = sum(not self._acts(s) for s in sequences) - num_empty
        metrics |= {"gspo/num_empty": float(num_empty), "learner/num_idle_sequences": float(num_idle)}
        return metrics | self._update_metrics(updates) | view.metrics(self.config.optimizer) | judged

    def _remember(self, metrics: Mapping[str, float], *, was_moved: bool) -> None:
        """Where no weight moved before an update, the spread is rightly 0 and says nothing of updates."""
        spread = metrics.get("gspo/log_ratio_std") if was_moved else None
        follows = self.objective.clip_spread is not None
        self._spreads = self._spreads.after(spread) if follows else SpreadMemory()

    def step_telling(self, sequences: Sequence[TrainSequence], tell: Tell) -> dict[str, float]:
        """The same step, which tells the terms of each trained token on the way; on one rank, those of this rank."""
        self._tell = tell
        try:
            return self.step(sequences)
        finally:
            self._tell = None

    def parameters(self) -> dict[str, Tensor]:
        """A copy of what is trained (this rank's share), by name."""
        found = state.training_tensors(self._policy, self._optimizer, self._device)
        kept = {name: tensor for name, tensor in found.items() if state.is_parameter(name)}
        return {name.removeprefix(state.PARAMETER): tensor.detach().cpu().clone() for name, tensor in kept.items()}

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
        rate = {name: getattr(config.optimizer, name) for name in LIVE_RATES}
        optimizer = self.config.optimizer.model_copy(update=rate)
        if config != self.config.model_copy(update={"optimizer": optimizer, "total_steps": config.total_steps}):
            raise ValueError(f"of the optimizer only {', '.join(LIVE_RATES)} change while a learner lives")
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
        self._policy.sum_between_copies(now=True)
        for micro_batch in self._split(sequences, range(len(sequences))):
            loss = -self._policy(micro_batch).sum() / num_actions
            self._backward(loss)
            total += loss.detach() * self._ranks.counts
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
            flat[index_N] = self._policy(micro_batch) * self._ranks.counts
        values = self._ranks.sum(flat).cpu().numpy()
        return [values[start:end].copy() for start, end in pairwise(starts)]

    def save_weights(self, directory: Path) -> None:
        """Write what is published: a plain Hugging Face directory in the dtype that this learner computes in, or, with
        `publishes_adapter`, the additions alone."""
        self._write(self.copy_weights(), directory)

    def save_adapter(self, directory: Path) -> None:
        """Write the low-rank additions alone to a new directory, as `peft` does."""
        self._policy.settle()
        self._write(self._policy.copy_adapter(), directory)

    def copy_weights(self) -> Copy:
        """A copy of what `save_weights` would write now."""
        self._policy.settle()
        return self._policy.copy_weights()

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
        self._policy.settle()
        found = state.training_tensors(self._policy, self._optimizer, self._device)
        if self._spreads.weight:
            remembered = [self._spreads.total, self._spreads.weight]
            found[state.LOG_RATIO_STD] = torch.tensor(remembered, dtype=torch.float64)
        kept = found if ranks.is_of_first_copy else {}
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()}
        content: state.Content = {
            "counters": dataclasses.asdict(self.counters),
            "model": state.fingerprint(self._model_dir),
        }
        if self.config.lora is not None:
            content["lora_alpha"] = self.config.lora.alpha

        number = state.format_of(self._optimizer)

        def write_share(directory: Path) -> None:
            if ranks.is_of_first_copy:  # the others hold the same
                state.write_shard(Path(directory), ranks.part, tensors)

        def complete(directory: Path) -> None:
            state.write_manifest(Path(directory), ranks.num_parts, content, number)

        return Copy(write_share, complete)

    def load_state(self, directory: Path) -> None:
        """The inverse of `save_state`; refuses a damaged or mismatched state and leaves the learner unchanged."""
        self.prepare_state(directory)()

    def prepare_state(self, directory: Path) -> Callable[[], None]:
        """Read and check a state; return a function that loads it. Raises ValueError if it does not fit this rank."""
        content, tensors = self._read_state(Path(directory))

        def load() -> None:
            state.restore_tensors(self._policy, self._optimizer, self._device, tensors)
            self.counters = LearnerCounters(**content["counters"])
            remembered = tensors.get(state.LOG_RATIO_STD)
            self._spreads = SpreadMemory() if remembered is None else SpreadMemory(*remembered.tolist())

        return load

    def load_weights(self, directory: Path) -> None:
        """Load what is trained alone, of a saved state of this model: enough to save weights, not to train on. Moments,
        which are twice as large, come into no memory and are of any kind."""
        _, tensors = self._read_state(Path(directory), state.is_parameter)
        state.restore_parameters(self._policy, tensors)

    def _read_state(
        self, directory: Path, wanted: Callable[[str], bool] = lambda _: True
    ) -> tuple[state.Content, dict[str, Tensor]]:
        content, tensors = state.read_state(directory, self._ranks.part, self._ranks.num_parts, wanted)
        if content["model"] != state.fingerprint(self._model_dir):
            raise state.UnfitState(f"{directory} is a state of another model than {self._model_dir}")
        alpha = None if self.config.lora is None else self.config.lora.alpha
        if content.get("lora_alpha", alpha) != alpha:  # shapes reveal rank and layers but not the scale of the sum
            raise state.UnfitState(f"{directory} holds additions of lora.alpha {content['lora_alpha']}, not {alpha}")
        self._policy.settle()
        state.check_fit(self._policy, self._optimizer, tensors)
        return content, tensors

    def close(self) -> None:
        """Does nothing with one rank: its memory is freed with the object."""

    def _load_reference(self) -> Callable[[MicroBatch], Tensor] | None:
        """Low-rank additions leave the model as it was beneath them, so it needs no second one."""
        if not self.objective.kl_coef:
            return None
        if self.config.lora is not None:
            return self._policy.beneath_additions
        plain = self._settled.model_copy(update={"activation_checkpointing": False})
        model = load_policy(self._model_dir, plain, self._device, self._ranks)
        model.requires_grad_(False)

        def score(micro_batch: MicroBatch) -> Tensor:
            logprobs: Tensor = model(micro_batch)
            model.settle()  # it has no backward pass, after which FSDP would give up what it gathered
            return logprobs

        return score

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
        budget, layout = self._settled.micro_batch_tokens, self._settled.layout
        assert budget != "auto"
        assert layout != "auto"
        return split_batch(
            sequences,
            indices,
            budget,
            layout=layout,
            score_all=score_all,
            rank=self._ranks.share,
            num_ranks=self._ranks.num_shares,
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
        return teaches(sequence) or bool(self.objective.kl_coef and sequence.num_actions)

    def _could_clip(
        self, sequences: Sequence[TrainSequence], shares: Sequence[Sequence[int]], updates: Sequence[Update]
    ) -> bool:
        """Whether any sequence was trained after the weights moved; otherwise every ratio is rightly 1."""
        moved = [update.applied and update.grad_norm > 0 for update in updates]
        if True not in moved or not self._optimizer.param_groups[0]["lr"]:
            return False
        later = shares[moved.index(True) + 1 :]
        return any(self._acts(sequences[index]) for share in later for index in share)

    def _view(self, sequences: Sequence[TrainSequence]) -> BatchView:
        """What the settings want to know of the whole batch before its first update; costs a pass if anything."""
        config = self.config.optimizer
        share = signal_share(sequences) if config.signal_scaling else 1.0
        objective = widened_clip(self.objective, self._spreads.mean)
        if config.max_step_k3 is None and not config.ess_scaling and not looks_at_batch(objective):
            return BatchView(objective, batch_bounds(objective, ()), share)
        logprobs = self.logprobs(sequences, sampled_only=True)
        drifts = [
            torch.from_numpy((found - sequence.behavior_logprobs)[sequence.action_mask])
            for sequence, found in zip(sequences, logprobs, strict=True)
            if self._acts(sequence)
        ]
        self._policy.settle()
        return BatchView(
            objective,
            batch_bounds(objective, drifts),
            share * math.sqrt(effective_share(drifts)) if config.ess_scaling else share,
            logprobs,
            None if config.max_step_k3 is None else StepStart(self._optimizer),
        )

    def _hold(self, sequences: Sequence[TrainSequence], view: BatchView) -> dict[str, float]:
        """Take back what of the step goes beyond `max_step_k3`."""
        bound, start = self.config.optimizer.max_step_k3, view.start
        if bound is None or start is None:
            return {}
        num_tokens = sum(sequence.num_actions for sequence in sequences)

        def measure() -> float:
            return mean_k3(view.logprobs, self.logprobs(sequences, sampled_only=True), num_tokens)

        def keep(share: float) -> None:
            self._policy.settle()  # a pass without gradient leaves parameters whole
            start.keep(share)

        length = hold_step(bound, measure, keep)
        return {"learner/step_k3": length.k3, "learner/step_kept": length.kept}

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
        self, sequences: Sequence[TrainSequence], share: Sequence[int], pieces: Sequence[_Work], view: BatchView
    ) -> LossStats:
        """Sum the gradients of one update."""
        masks = [torch.tensor(sequences[index].action_mask) for index in share]
        num_sequences, num_tokens = loss_denominators(masks, [sequences[index].weight for index in share])
        stats = LossStats.zero(self._device)
        for piece in pieces:
            self._policy.sum_between_copies(now=piece is pieces[-1])
            stats = stats + self._accumulate_one(piece, num_sequences, num_tokens, view)
        return stats

    def _accumulate_one(self, piece: _Work, num_sequences: float, num_tokens: float, view: BatchView) -> LossStats:
        replaying: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._routing is not None and piece.routes is not None:
            replaying = self._routing.replay(piece.routes)
        with replaying:  # covers the backward pass too, where checkpointing repeats the forward pass
            loss, stats = self._loss(piece, num_sequences, num_tokens, view)
            self._backward(loss)
        return stats

    def _loss(self, piece: _Work, num_sequences: float, num_tokens: float, view: BatchView) -> tuple[Tensor, LossStats]:
        micro_batch = piece.micro_batch
        policy_N = self._policy(micro_batch)
        if not len(policy_N):  # this rank has no work, but the others wait for its gradients
            return policy_N.sum(), LossStats.zero(self._device)
        policy_BT = micro_batch.table(policy_N)
        if self._ranks.counts:
            self._scored.append((micro_batch.indices, policy_BT.detach().float()))
        loss, stats = policy_loss(
            view.objective,
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
            bounds=view.bounds,
            tell=partial(self._tell, micro_batch.indices) if self._tell and self._ranks.counts else None,
        )
        return loss, stats if self._ranks.counts else LossStats.zero(self._device)

    def _backward(self, loss: Tensor) -> None:
        # FSDP averages gradients over ranks, but ours must be summed
        scaled = loss * self._ranks.num_ranks
        scaled.backward()  # type: ignore[no-untyped-call]

    def _update(self, rate_share: float = 1.0, checks: Checks | None = None) -> Update:
        optimizer = self.config.optimizer
        lr = rate_share * learning_rate(optimizer, self.counters.num_steps, self.config.total_steps)
        update = apply_update(self._optimizer, lr, optimizer, checks)
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
            metrics["learner/num_bounded_updates"] = float(sum(update.was_bounded for update in updates))
        if aligned := [update.alignment for update in updates if update.applied and update.alignment is not None]:
            metrics["learner/grad_alignment"] = float(np.mean(aligned))
        return metrics
