"""The host waits for the device once an update, not once a micro-batch, and what is wrong is refused all the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_core.learner import Learner
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective import NonFiniteInput, ObjectiveError
from gspo_core.objective.checks import read_together, require
from gspo_core.objective_config import ObjectiveConfig
from tests.core.learner_support import (
    GATED,
    largest_difference,
    make_learner,
    make_sequences,
    weights,
    with_behavior,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3")


def num_waits(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> int:
    """Truth values and numbers that were read from tensors while gradients were made."""
    found = 0
    accumulate = Learner._accumulate

    def counted(read: Any) -> Any:
        def reading(tensor: torch.Tensor) -> Any:
            nonlocal found
            found += 1
            return read(tensor)

        return reading

    def counting(self: Learner, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("__bool__", "__int__", "__float__", "item"):
                patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
            return accumulate(self, *given)

    sequences = make_sequences()
    with_behavior(learner, sequences)
    monkeypatch.setattr(Learner, "_accumulate", counting)
    learner.step(sequences)
    monkeypatch.undo()
    return found


def test_waits_do_not_grow_with_micro_batches(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = ObjectiveConfig(minibatches=1, k3_gate=0.02)
    few = num_waits(make_learner(model_dir, objective), monkeypatch)
    many = num_waits(make_learner(model_dir, objective, micro_batch_tokens=1), monkeypatch)
    assert few == many


def num_readings(model_dir: Path, **objective: Any) -> int:
    """Of one step, but for what AdamW reads of its counters, which are on the host."""
    optimizer = OptimizerConfig(lr=1e-3, max_grad_growth=1.0)
    learner = make_learner(model_dir, ObjectiveConfig(k3_gate=0.02, **objective), optimizer=optimizer)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    learner.step(sequences)  # moments to be compared with
    found, is_counting = 0, True
    update = learner._optimizer.step

    def uncounted() -> None:
        nonlocal is_counting
        is_counting = False
        update()
        is_counting = True

    def counted(read: Any) -> Any:
        def reading(tensor: torch.Tensor, *given: Any) -> Any:
            nonlocal found
            found += is_counting
            return read(tensor, *given)

        return reading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner._optimizer, "step", uncounted)
        for name in ("__bool__", "__int__", "__float__", "item", "tolist", "numpy"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        learner.step(sequences)
    return found


def test_the_host_waits_once_for_an_update(model_dir: Path) -> None:
    """For the checks, the length of the gradient, the usual one, and the mean of those before, read together."""
    readings = [num_readings(model_dir, minibatches=number) for number in (1, 2, 4)]
    assert readings[1] - readings[0] == 1
    assert readings[2] - readings[0] == 3


def test_a_log_prob_that_is_not_finite_is_refused_before_anything_moves(model_dir: Path) -> None:
    learner = make_learner(model_dir, GATED)
    sequences = make_sequences()
    with_behavior(learner, sequences)
    head = learner._policy.head.weight
    with torch.no_grad():
        head[0, 0] = float("nan")
    before = weights(learner)
    with pytest.raises(NonFiniteInput, match="not finite at a trained position"):
        learner.step(sequences)
    with torch.no_grad():
        before[next(n for n, p in learner._policy.named_parameters() if p is head)][0, 0] = head[0, 0] = 0.0
    assert largest_difference(before, weights(learner)) == 0


def test_a_negative_staleness_is_refused(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    sequences = [dataclasses.replace(one, staleness=np.full(one.num_tokens, -1)) for one in make_sequences(4)]
    with pytest.raises(ObjectiveError, match="negative staleness"):
        learner.step(sequences)


def failing(text: str) -> Any:
    return lambda: ValueError(text)


def test_the_first_of_the_checks_that_fail_is_told() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    with pytest.raises(ValueError, match="at once"):
        require(no, failing("at once"))
    both = [(no, failing("first")), (no, failing("second"))]
    with pytest.raises(ValueError, match="first"):
        require_all([(yes, failing("none")), *both])
    require_all([(yes, failing("none"))])


def test_an_error_of_the_block_itself_comes_first() -> None:
    with pytest.raises(RuntimeError, match="own"):
        require_all([(torch.tensor(False), failing("late"))], RuntimeError("own"))


def require_all(checks: list[tuple[torch.Tensor, Any]], error: Exception | None = None) -> None:
    reached = 0
    try:
        with read_together():
            for holds, failure in checks:
                require(holds, failure)
                reached += 1
            if error is not None:
                raise error
    finally:
        assert reached == len(checks), "nothing is read before the end"
