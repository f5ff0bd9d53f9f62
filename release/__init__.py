class NotReady(Exception):
    """What is to be done first."""
