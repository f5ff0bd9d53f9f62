"""Sandboxes of the kinds that a host cannot make itself, and the doors through which it reaches them.

Reading order: ``container`` (one of Docker's for each), ``warm`` (prepares some ahead), ``server`` (the contract over
HTTP: for hosts of this machine, and as ``python -m services.hosts.sandboxes`` for other machines), ``relay`` (a host's
door to it), ``offers`` (which kinds the settings allow). What a sandbox is, and the client, is in
`environments.sandbox`.
"""
