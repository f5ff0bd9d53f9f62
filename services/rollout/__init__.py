"""The rollout worker: holds many multi-turn episodes at once and streams their segments.

Reading order: ``policy`` (what an engine's answer is), ``ledger`` (the tokens of an attempt), ``attempt`` (its turns),
``episode`` (attempts until one has an outcome), ``setting`` (what both are given), ``engines`` (who samples),
``outbox`` and ``retry`` (how segments become durable), ``loading`` and ``job`` (all episodes of one job),
``worker`` (all jobs), ``__main__`` (the process). No module here imports torch.
"""
