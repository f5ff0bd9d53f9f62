"""Baselines for asynchronous GSPO: a grid of short trainings that differ in one thing each.

One process, no service: staleness is set, not what a busy machine happens to make of it. Read ``cells`` (what is
compared), ``play`` (episodes under weights of a chosen age), ``training`` (one cell), then ``report``.
``docs/baselines.md`` says what came out.
"""
