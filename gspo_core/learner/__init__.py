"""A policy and its optimizer: batches of sequences in, updated weights and metrics out.

Read `training` first; below it `policy_model` (`model_directory`, `attention`, `logprobs`, `low_rank`, `routing`),
`optimizer`, `ranks` and `state`. Other packages use only what is named here; user settings live in
`gspo_core.learner_config`.
"""

from gspo_core.learner.model_directory import UnsupportedModel
from gspo_core.learner.state import UnknownFormat, check_state
from gspo_core.learner.training import Copy, Learner, LearnerCounters

__all__ = ["Copy", "Learner", "LearnerCounters", "UnknownFormat", "UnsupportedModel", "check_state"]
