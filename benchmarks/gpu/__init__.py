"""What to try first on a machine with GPUs: is it right, does the service learn, what is held, how fast?

Read `__main__` (the command and its table), then `parts` (their order), `runner` (each in a process, bounded and kept),
`check`, and the parts: `right`, `system`, `memory`, `speed`, `overlap`, `several`.
"""
