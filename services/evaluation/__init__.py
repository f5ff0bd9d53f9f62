"""Plays episodes with a model of this machine, outside any job, for ``gspo eval``."""
