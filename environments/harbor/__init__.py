"""Tasks in the format of Harbor: an instruction, the files to begin with, tests that write a reward, and a solution.

Reading order: ``task`` (reads a folder and names what it asks for), ``dockerfile`` (the part of it that needs no
container), ``places`` (Harbor's absolute paths in a folder of an episode), ``reward`` (what tests wrote). The
environment is `environments.adapters.harbor`.
"""
