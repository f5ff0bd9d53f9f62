"""The parts of ``benchmarks.trl_race``: what both sides are told, each side, the judge, and the check of tokens."""
