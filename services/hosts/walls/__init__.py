"""Tiers of isolation for code of environments and policies: what stands between it and the service.

Reading order: ``tiers`` (which tier an order gets, and whether this machine offers it), ``plan`` (what is visible
inside), ``terms`` (what both hand to the next), ``enter`` (the program that builds the wall and then becomes the
environment's Python), ``kernel``, ``filesystem``, ``users``, ``syscalls`` and `gspo_core.landlock` (its parts),
``control_groups`` (what all of them take together), ``scratch`` (a host's folder for temporary files). All but
``tiers`` and ``plan`` need Python alone.
"""
