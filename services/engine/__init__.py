"""The embedded engine: a torch server that speaks the default engine protocol, as far as the service uses it.

Reading order: ``scheduler`` (what runs when), ``model`` (one forward over ragged requests), ``kv_cache`` and
``prefix_cache`` (what is remembered between steps and between turns), ``protocol`` and ``app`` (HTTP).
"""
