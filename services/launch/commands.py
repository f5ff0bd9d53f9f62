"""The commands that the service adds to ``gspo``; ``gspo_core.cli.service`` reads them.

Rule: this module is cheap to import. Each command names a module, imported only when the command runs.
"""

from __future__ import annotations

from gspo_core.cli.service import ServiceCommand

COMMANDS = (
    ServiceCommand("up", "run the whole stack on this machine until Ctrl-C", "services.launch.up"),
    ServiceCommand("launch", "run the whole stack elsewhere", "services.launch.launchers"),
    ServiceCommand("fetch", "fetch a model or a data set of the Hugging Face hub", "services.launch.fetch"),
    ServiceCommand("snapshot", "keep the data directory in a bucket, and bring it back", "services.launch.snapshot"),
    ServiceCommand("audit-log", "print who changed what over the API", "services.launch.audit_log"),
    ServiceCommand("fsck", "look for damage in a data directory, and mend what is safe", "services.launch.fsck"),
    ServiceCommand("env serve", "serve an environment over OpenEnv's protocol", "services.hosts.openenv_server"),
)

CHECKS = "services.launch.checks"
"""The module with the checks of this machine that ``gspo doctor`` makes."""

POLICIES = "services.evaluation.local"
"""The module that opens models of this machine for ``gspo eval``."""
