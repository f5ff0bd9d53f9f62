"""Harnesses on the whole stack: processes, an engine that samples from a real model, and training while they play.

Reading order: ``speech`` (what the model is taught to say), ``teaching`` (how), ``passage`` (reads along between the
processes), ``agent`` (plays an episode with a harness), ``run`` (the stack and its one job), ``judged``, ``page``.
"""
