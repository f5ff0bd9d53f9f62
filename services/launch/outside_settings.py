"""``GSPO_*`` variables that a stack on Slurm or Ray decides itself, and that would win over it or be ignored.

Rule: they are refused by name where a person types or submits. Other settings pass through to every process.
"""

from __future__ import annotations

import os

from gspo_core.cli.command import CommandError
from services.launch.topology import PROCESSES
from services.process.settings import PREFIX, SettingsError, load_settings

_SECRETS = "the stack makes its own secrets below --data-dir"
DECIDED = {
    "redis_url": "the stack starts a Redis of its own",
    "data_dir": "--data-dir says where that is",
    "secrets_dir": _SECRETS,
    "api_keys": _SECRETS,
    "engine_keys": _SECRETS,
    "engine_urls": "the stack starts its own engines",
    "api_host": "the launcher chooses where its API listens",
    "api_port": "ports are moved with --ports, or by the variables in the batch script",
    **{one.bind: f"the launcher chooses where its {one.name} listens" for one in PROCESSES if one.bind},
    **{one.url: f"the launcher says where its {one.name} is" for one in PROCESSES if one.url},
    "health_file": "that is for one process, and a launcher starts several",
}
"""Each with who decides it."""


def is_decided(name: str) -> bool:
    """Whether this variable must not reach a process of the stack from outside."""
    return _setting(name) in DECIDED


def refuse_decided(data_dir: str) -> None:
    """Also a misspelt name or a bad value, as every process does. Raises CommandError."""
    for name, value in os.environ.items():
        if not value or not is_decided(name) or _is_same_place(name, value, data_dir):
            continue
        raise CommandError(f"{name} is set, but {DECIDED[_setting(name)]}: unset it")
    try:
        load_settings()
    except SettingsError as error:
        raise CommandError(str(error)) from None


def _setting(name: str) -> str:
    """The field of Settings; empty for what is none of ours. Case does not count."""
    lowered, prefix = name.lower(), PREFIX.lower()
    return lowered.removeprefix(prefix) if lowered.startswith(prefix) else ""


def _is_same_place(name: str, value: str, data_dir: str) -> bool:
    return _setting(name) == "data_dir" and os.path.realpath(os.path.expanduser(value)) == os.path.realpath(data_dir)
