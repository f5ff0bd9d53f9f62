"""Launchers: each module here is a place of ``gspo launch``, named after it.

A launcher has ``HELP``, ``add_options(parser)`` and ``run(arguments)``; ``services.launch.topology`` tells it what to
start. A new launcher is one new file; nothing else names it.
"""
