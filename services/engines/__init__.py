"""Inference engines as the service sees them, and every kind of engine that it can talk to.

Reading order: ``protocol`` (the ``Engine`` that callers depend on, and its errors), ``kinds`` (which kinds there are,
and how an address becomes an engine), then one module per kind. Nothing here knows Redis or a job.
"""
