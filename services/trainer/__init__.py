"""The trainer process: claims a job, dispatches groups, trains complete groups, publishes weights.

Start with ``worker`` (claims jobs), then ``run`` (trains one job step by step), ``telling.run_phase`` (how a run ends)
and ``stopping`` (stop conditions). Each attempt runs in its own process (``attempt_process``, ``attempt_main``,
``attempt``) or under ``torchrun``.
``groups``: the path of a group into a batch, from ``tasks`` and ``admission`` to ``batch_selection``.
``past``: background writing, recovery and replay. ``fleet``: the engines and how they receive weights.
``ranks``: a learner split over several processes. ``telling``: status, reports, alarms and failures.
"""
