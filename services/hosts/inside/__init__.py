"""The environment host: a process that loads one environment once and forks a process for every few sessions of it.

Reading order: ``fork_server`` (loads, forks, watches, reaps), ``limits`` (what a forked process may use), ``sessions``
(serves sessions in it), ``traits`` (how many it may hold). The other side are the modules of ``services.hosts``.
It needs nothing but Python and this tree, so it runs under the interpreter of an environment's own virtual environment.
"""
