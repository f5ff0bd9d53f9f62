"""For authors of environments: ``check_environment(MyEnvironment)`` in a test, ``gspo env validate REF`` on a terminal.

Read in this order: ``report`` (what is said), ``rehearsal`` (episodes without a model), ``checks`` (what is looked at),
``watch`` (running it all, whatever the author's code does), ``__main__`` (in a process apart, for the command).
For authors of agents: ``scripted_llm("5")`` is a model that says what a test wants.
"""

from gspo_core.testing.report import Check, EnvironmentReport, Status
from gspo_core.testing.scripted_llm import ScriptedLlm, scripted_llm
from gspo_core.testing.watch import EnvironmentRefused, check_environment, validate

__all__ = [
    "Check",
    "EnvironmentRefused",
    "EnvironmentReport",
    "ScriptedLlm",
    "Status",
    "check_environment",
    "scripted_llm",
    "validate",
]
