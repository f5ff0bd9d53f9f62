"""The whole system on one machine: ``stack`` (processes), ``up`` (``gspo up``), ``demo`` (``make demo``)."""
