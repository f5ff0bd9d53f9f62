"""Commands and checks that come with the service, where one is installed.

Rule: the library imports nothing of the service. It looks for one module by name, ``REGISTRY``, in which the service
lists what it adds; where only the library is installed, each of those commands says so. It is found by import and not
by entry point: a container runs the service from a plain folder, and a checkout can be newer than installed metadata.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from gspo_core.cli.command import CommandError, CommandParser

if TYPE_CHECKING:
    from gspo_core.cli.finding import Finding
    from gspo_core.evaluation.policy import LocalPolicies

REGISTRY = "services.launch.commands"
ABSENT: Mapping[str, str] = {
    "up": "run the whole stack on this machine (needs the service)",
    "launch": "run the whole stack elsewhere (needs the service)",
    "fetch": "fetch a model or a data set of the Hugging Face hub (needs the service)",
    "snapshot": "keep the data directory in a bucket, and bring it back (needs the service)",
    "audit-log": "print who changed what over the API (needs the service)",
    "fsck": "look for damage in a data directory (needs the service)",
    "env serve": "serve an environment over OpenEnv's protocol (needs the service)",
}
HOW_TO_INSTALL = "Install gspo-service of the same version, or type `make setup` in a checkout of the project."
Actions: TypeAlias = "argparse._SubParsersAction[CommandParser]"


@dataclass(frozen=True)
class ServiceCommand:
    name: str
    """Two words for an action of a command, such as ``env serve``."""
    help: str
    module: str
    """A ``CommandModule``, imported when the command is typed."""


class CommandModule(Protocol):
    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns the exit status. Raises CommandError."""
        ...


class Registry(Protocol):
    """What the module ``REGISTRY`` offers."""

    COMMANDS: Sequence[ServiceCommand]
    CHECKS: str
    """A ``CheckModule``, imported when the doctor is asked."""
    POLICIES: str
    """A ``LocalPolicies``, imported when ``gspo eval`` is given a model that is not behind an API."""


class CheckModule(Protocol):
    CHECKS: Sequence[Callable[[], Finding]]


def registry() -> Registry | None:
    """None where only the library is installed."""
    try:
        return cast(Registry, import_module(REGISTRY))
    except ModuleNotFoundError as error:
        if error.name is not None and REGISTRY.startswith(error.name):
            return None
        raise


def add_service_commands(actions: Actions, group: str = "") -> None:
    """Add to ``actions`` the service's commands whose names start with ``group`` and consist of one more word."""
    found = registry()
    if found is None:
        for name, text in ABSENT.items():
            if _belongs(name, group):
                _add_absent(actions, name, text)
        return
    for command in found.COMMANDS:
        if _belongs(command.name, group):
            actions.add_parser(command.name.split()[-1], help=command.help).defer(_filler(command))


def checks() -> Sequence[Callable[[], Finding]] | None:
    """The service's checks of this machine; None where only the library is installed."""
    found = registry()
    return None if found is None else cast(CheckModule, import_module(found.CHECKS)).CHECKS


def local_policies() -> LocalPolicies:
    """Raises CommandError."""
    found = registry()
    if found is None:
        raise CommandError(
            f"a model's own engine needs the service, but only the library is installed here. {HOW_TO_INSTALL} Or name "
            f"an API that speaks OpenAI's chat completions."
        )
    return cast("LocalPolicies", import_module(found.POLICIES))


def _belongs(name: str, group: str) -> bool:
    return name.rpartition(" ")[0] == group


def _filler(command: ServiceCommand) -> Callable[[argparse.ArgumentParser], None]:
    def fill(parser: argparse.ArgumentParser) -> None:
        try:
            module = cast(CommandModule, import_module(command.module))
        except ModuleNotFoundError as error:
            raise CommandError(
                f"`gspo {command.name}` runs the service, but {error.name} is not installed here. {HOW_TO_INSTALL}"
            ) from error
        parser.set_defaults(run=module.run)
        module.add_options(parser)

    return fill


def _add_absent(actions: Actions, name: str, text: str) -> None:
    def run(_: argparse.Namespace) -> int:
        raise CommandError(f"`gspo {name}` needs the service, but only the library is installed here. {HOW_TO_INSTALL}")

    # No word is an option to it: whatever follows, the answer is the same.
    parser = actions.add_parser(name.split()[-1], help=text, prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=run)
