"""What starts the system: ``topology`` (which processes there are), ``stack`` and ``up`` (``gspo up``: here), ``launch``
with ``launchers`` (``gspo launch``: elsewhere), ``demo`` (``make demo``).
"""
