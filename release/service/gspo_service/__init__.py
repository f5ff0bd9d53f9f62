"""The GSPO service as a wheel: `tree` beside this file holds its packages, which the `gspo` command alone searches."""

__version__ = "0.2.0"
