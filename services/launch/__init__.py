"""Starting the system: ``topology`` (the processes), ``stack`` and ``up`` (``gspo up``: on this machine), ``launch``
with ``launchers`` (``gspo launch``: elsewhere).
"""
