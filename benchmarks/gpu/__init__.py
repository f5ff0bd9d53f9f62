"""What to try first on a machine with GPUs: does the learner compute there what it computes on a CPU, and how fast?

Read `__main__` (the command and its list of checks), then `one` (checks of one GPU), `sending` (weights to an engine on
another one), `several` (checks of some together) and `rate` (tokens a second, beside TRL where that is installed).
"""
