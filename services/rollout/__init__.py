"""The rollout worker: holds many multi-turn episodes at once and streams their segments.

Reading order: ``ledger`` (the tokens of one episode), ``episode`` (its life), ``engines`` (who samples), ``outbox``
(how segments become durable), ``job`` (all episodes of one job), ``worker`` (all jobs), ``__main__`` (the process).
No module here imports torch.
"""
