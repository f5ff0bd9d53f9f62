"""What the service adds to the ``gspo`` command where it is installed; ``gspo_core.cli.service`` reads it.

Rule: this module costs nothing to import. Each command names a module, which is imported when the command is typed.
"""

from __future__ import annotations

from gspo_core.cli.service import ServiceCommand

COMMANDS = (
    ServiceCommand("up", "run the whole stack on this machine until Ctrl-C", "services.local.up"),
    ServiceCommand("launch", "run the whole stack elsewhere", "services.local.launch"),
    ServiceCommand("env serve", "serve an environment over OpenEnv's protocol", "services.openenv_server"),
)

CHECKS = "services.local.checks"
"""The module with the checks of this machine that ``gspo doctor`` makes."""
