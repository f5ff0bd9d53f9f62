"""A policy and its optimizer: batches of sequences in, updated weights and metrics out.

Read `training` first; below it `policy`, the seam to a model's code, and its first implementation `policy_model`
(`model_directory`, `attention`, `logprobs`, `low_rank`, `routing`), `optimizer`, `ranks` and `state`. Other packages
use only what is named here; user settings live in `gspo_core.learner_config`.
"""

from gspo_core.learner.conditions import compute_as, computing, device_here
from gspo_core.learner.policy import Copy, TrainedPolicy, UnsupportedModel
from gspo_core.learner.ranks import Ranks
from gspo_core.learner.state import UnfitState, UnknownFormat, check_state
from gspo_core.learner.training import Learner, LearnerCounters

__all__ = [
    "Copy",
    "Learner",
    "LearnerCounters",
    "Ranks",
    "TrainedPolicy",
    "UnfitState",
    "UnknownFormat",
    "UnsupportedModel",
    "check_state",
    "compute_as",
    "computing",
    "device_here",
]
