"""Starting the system: ``topology`` (the processes), ``stack`` and ``up`` (``gspo up``: on this machine),
``launchers`` (``gspo launch``: elsewhere).
"""
