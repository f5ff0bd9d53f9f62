"""What the system means: nouns, job specification, environment contract, token codecs, objective and learner.

Nothing here knows Redis, an HTTP server, environment variables or a clock. The light half imports no torch.
"""

__version__ = "0.2.0"
