"""The commands that the service adds to ``gspo``; ``gspo_core.cli.service`` reads them.

Rule: this module is cheap to import. Each command names a module, imported only when the command runs.
"""

from __future__ import annotations

from gspo_core.cli.service import ServiceCommand

COMMANDS = (
    ServiceCommand("up", "run the whole stack on this machine until Ctrl-C", "services.launch.up"),
    ServiceCommand("launch", "run the whole stack elsewhere", "services.launch.launch"),
    ServiceCommand("fetch", "fetch a model or a data set of the Hugging Face hub", "services.launch.fetch"),
    ServiceCommand("env serve", "serve an environment over OpenEnv's protocol", "services.hosts.openenv_server"),
)

CHECKS = "services.launch.checks"
"""The module with the checks of this machine that ``gspo doctor`` makes."""
