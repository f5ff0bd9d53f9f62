"""The files of tests that take longest, the longest first, as `python -m benchmarks.test_time` finds them.

It decides what workers begin with, and nothing else: an order that is out of date costs a minute at the end.
"""

from __future__ import annotations

HEAVIEST = (
    "services/state/test_queue_model.py",
    "services/trainer/test_trainer_resume.py",
    "releases/test_taking_over.py",
    "services/trainer/test_trainer_ranks.py",
    "services/evaluation/test_eval_command.py",
    "services/trainer/test_trainer_attempts.py",
    "services/trainer/test_trainer_late_rewards.py",
    "services/api/test_api_process.py",
    "services/rollout/test_rollout_tokens.py",
    "services/trainer/test_trainer_recorded.py",
    "services/trainer/test_trainer_forks.py",
    "core/test_learner_state.py",
    "services/trainer/test_trainer_giving_way.py",
    "core/test_learner_arranged.py",
    "ladder/test_ladder.py",
    "core/test_learner_ranks.py",
)
