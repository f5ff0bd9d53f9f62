"""What `gspo resume` says of a job that is made longer."""

from __future__ import annotations

import pytest

from gspo_core.cli.jobs import told_of_idle_steps


@pytest.mark.parametrize(
    ("settings", "optimizer", "told"),
    [
        ({"steps": 8, "optimizer.decay_steps": 6}, {"min_lr_ratio": 0.0}, True),
        ({"steps": 8, "optimizer.decay_steps": 6}, {"min_lr_ratio": 0.1}, False),
        ({"steps": 8, "optimizer.decay_steps": 8}, {"min_lr_ratio": 0.0}, False),
        ({"steps": 8}, {"min_lr_ratio": 0.0}, False),
    ],
)
def test_steps_that_change_nothing_are_told(settings: dict[str, int], optimizer: dict[str, float], told: bool) -> None:
    said = told_of_idle_steps({"optimizer": dict(optimizer)}, dict(settings), 8)
    assert ("2 steps after it train at rate 0" in said) is told
    assert bool(said) is told
