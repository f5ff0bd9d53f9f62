"""The rollout worker: holds many multi-turn episodes at once and streams their segments.

Reading order: ``attempt`` (the turns of an episode), ``episode`` (attempts until one has an outcome), ``setting``
(their inputs), ``engines`` (the engines that sample), ``loading`` and ``job`` (all episodes of one job), ``worker``
(all jobs), ``__main__`` (the process). Policy, ledger, outbox and retries are in `services.episodes`. No module here
imports torch.
"""
