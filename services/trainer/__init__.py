"""The trainer process: claims a job, dispatches groups, trains what is ready, publishes weights.

Read in this order: ``worker`` (claims jobs), ``run`` (one job, step by step), ``tasks`` (what is
sampled), ``admission`` (when), ``intake`` (what arrives), ``taking`` (which of it is trained), ``sequences`` (as what),
``engines`` (who samples with which weights).
Then what outlives it: ``recovery`` (where it goes on), with ``checkpoints``, ``lineage`` and ``replay``; ``behind``
(what is written while the next step is trained) and ``disk`` (what happens when it is full).
Where it is several processes: ``followers`` (what the first rank says to the others, and when they are lost),
``ranked_learner`` (a learner in parts), ``follower`` (the others), over ``rank_calls`` and ``rank_lines``.
Beside these: ``tuning`` (what a user has changed), ``stopping`` (when it is over), ``watchdog`` (when nothing moves),
``reports`` and ``alarms`` (what is told).
"""
