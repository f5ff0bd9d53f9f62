"""The objective: log-probs, mask and advantages in, a loss with its gradient and its statistics out.

One rule: gates, masks and corrections lower the signal, never the denominators. `docs/objective.md` explains formulas
and defaults. Reading order: `loss` (the whole objective in one function), `inputs`, `pooling`, `batch_bounds`,
`weights`, `losses`, `stats`, `metrics`, `alarms`, `clip_spread`. It holds no model and takes no step
(`gspo_core.learner` does).
"""

from gspo_core.objective.alarms import Alarm, AlarmKind, AlarmPatience, group_alarms, loss_alarms
from gspo_core.objective.batch_bounds import BatchBounds, batch_bounds
from gspo_core.objective.checks import Checks, collected
from gspo_core.objective.clip_spread import SpreadMemory, widened_clip
from gspo_core.objective.inputs import NonFiniteInput, ObjectiveError
from gspo_core.objective.loss import TokenTerms, loss_denominators, policy_loss
from gspo_core.objective.metrics import loss_metrics
from gspo_core.objective.stats import LossStats
from gspo_core.objective_config import (
    AdvantageConfig,
    Band,
    ObjectiveConfig,
    config_refusals,
    config_warnings,
)

__all__ = [
    "AdvantageConfig",
    "Alarm",
    "AlarmKind",
    "AlarmPatience",
    "Band",
    "BatchBounds",
    "Checks",
    "LossStats",
    "NonFiniteInput",
    "ObjectiveConfig",
    "ObjectiveError",
    "SpreadMemory",
    "TokenTerms",
    "batch_bounds",
    "collected",
    "config_refusals",
    "config_warnings",
    "group_alarms",
    "loss_alarms",
    "loss_denominators",
    "loss_metrics",
    "policy_loss",
    "widened_clip",
]
