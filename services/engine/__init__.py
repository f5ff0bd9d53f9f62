"""The embedded engine: a torch server that speaks the default engine protocol, as far as the service uses it.

Reading order: ``scheduler`` (the order of work), ``model`` (one forward over ragged requests), ``kv_cache`` and
``prefix_cache`` (memory between steps and between turns), ``protocol`` and ``app`` (HTTP).
"""
