"""Whether a job fits its machines, before anything is loaded: memory by phase and kind, settings, seconds a step.

    from gspo_core.plan import parse_machines, plan_job
    plan = plan_job(spec, parse_machines("8xH100"))

Rule: the learner resolves its own `auto` settings, and refuses what cannot fit, by the functions of this package; what
is told to users cannot drift from what is done. It imports no torch.
"""

from gspo_core.plan.arrangement import arrangement_problem
from gspo_core.plan.choice import LayoutChoice, LearnerPlace, choose, first_choice, refusal
from gspo_core.plan.job import JobPlan, plan_job
from gspo_core.plan.machines import Machines, parse_machines, usable
from gspo_core.plan.memory import (
    BLOCK,
    ROUNDED_AT_ONCE,
    UPDATED_AT_ONCE_BYTES,
    PhaseMemory,
    checkpoint_bytes,
    plan_memory,
)
from gspo_core.plan.report import describe, plan_view
from gspo_core.plan.setting import FLOAT, Setting, chunk_rows
from gspo_core.plan.shapes import ModelShape, UnknownShape, planned_shape, read_shape, shape_of, share_of

__all__ = [
    "BLOCK",
    "FLOAT",
    "ROUNDED_AT_ONCE",
    "UPDATED_AT_ONCE_BYTES",
    "JobPlan",
    "LayoutChoice",
    "LearnerPlace",
    "Machines",
    "ModelShape",
    "PhaseMemory",
    "Setting",
    "UnknownShape",
    "arrangement_problem",
    "checkpoint_bytes",
    "choose",
    "chunk_rows",
    "describe",
    "first_choice",
    "parse_machines",
    "plan_job",
    "plan_memory",
    "plan_view",
    "planned_shape",
    "read_shape",
    "refusal",
    "shape_of",
    "share_of",
    "usable",
]
