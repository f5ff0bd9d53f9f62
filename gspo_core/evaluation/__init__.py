"""Scores a policy in an environment: the evaluator of ``gspo eval``, whose statistics held-out evaluations of jobs use.

Read in this order: ``intervals`` and ``comparison`` (what numbers say), ``policy`` (what plays), ``episode`` (one
episode), ``evaluation`` (all of them), ``report``. ``chat_completions`` is the policy behind an API; the one that has
weights here comes with the service.
"""
