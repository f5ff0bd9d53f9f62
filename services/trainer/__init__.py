"""The trainer process: claims a job, dispatches groups, trains what is ready, publishes weights.

Read in this order: ``worker`` (claims jobs), ``run`` (one job, step by step), ``tasks`` (what is
sampled), ``intake`` (what arrives), ``sequences`` (what is trained), ``engines`` (who samples with which weights).
Then what outlives it: ``recovery`` (where it goes on), with ``checkpoints``, ``lineage`` and ``replay``; ``behind``
(what is written while the next step is trained) and ``disk`` (what happens when it is full).
Beside these: ``tuning`` (what a user has changed), ``stopping`` (when it is over), ``watchdog`` (when nothing moves),
``reports`` and ``alarms`` (what is told).
"""
