"""Finds an environment by its import string: ``package.module:Class`` or ``path/to/file.py:Class``.

Rule: every mistake in a reference ends in ``InvalidEnvironment`` with a text that says what to change. A file may
import its neighbours, wherever the process stands that loads it; installed packages of the same name win.
It does not decide whether a reference is allowed: loading runs its code, so ask before calling.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Literal

from gspo_core.env.agents import AgentEnvironment, AgentStart
from gspo_core.env.plain import PlainEnvironment
from gspo_core.env.trl import TrlEnvironment
from gspo_core.environment_contract import Environment, InvalidEnvironment
from gspo_core.json_value import JSON


class UnreachableEnvironment(InvalidEnvironment):
    """What it runs in, or asks, gives no answer now; it may give one later."""


class NeedsAgent(InvalidEnvironment):
    """The reference names an agent, and its user did not say so."""


def load_environment(
    ref: str,
    config: Mapping[str, JSON] | None = None,
    *,
    system_prompt: Literal["docstring", "none"] = "docstring",
    agent: AgentStart | None = None,
) -> Environment:
    """The environment that ``ref`` names; ``config`` becomes the keyword arguments of its class.

    ``agent``: an agent plays it, started in this way.
    """
    module, found = _find(ref)
    if agent is not None:
        reward = None if agent.reward is None else _find(agent.reward)[1]
        return AgentEnvironment(found, module, config or {}, agent, name=ref, reward=reward)
    return _as_environment(ref, found, dict(config or {}), system_prompt)


def load_object(ref: str) -> object:
    """The class or function that ``ref`` names, whatever it is for."""
    return _find(ref)[1]


def _find(ref: str) -> tuple[ModuleType, object]:
    module_name, separator, attribute = ref.rpartition(":")
    if not separator or not module_name or not attribute:
        raise InvalidEnvironment(
            f"{ref!r} does not name an environment: write package.module:Class or path/to/file.py:Class"
        )
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    found: object = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidEnvironment(f"{ref}: {module_name} has no {attribute!r}; {_offers(module)}") from None
    return module, found


def _as_environment(ref: str, found: object, config: Mapping[str, JSON], system_prompt: str) -> Environment:
    if isinstance(found, PlainEnvironment | TrlEnvironment):
        if config:
            raise InvalidEnvironment(
                f"{ref} is a finished environment and takes no config, but was given {sorted(config)}"
            )
        return found
    adapter = getattr(found, "as_environment", None)
    if adapter is not None:  # a world that is no class of tools, e.g. a foreign server
        return _adapted(ref, adapter, config)
    if _owns_its_loop(found):
        raise NeedsAgent(
            f"{ref} is a function that owns its loop, an agent: write `agent: {{}}` beside its ref in the job, or name "
            "a class whose public methods are tools"
        )
    if not callable(found):
        raise InvalidEnvironment(f"{ref} is a {type(found).__name__}, not a class")
    return PlainEnvironment(found, config, name=ref, use_docstring=system_prompt == "docstring")


def _owns_its_loop(found: object) -> bool:
    """An agent: ``run(task, llm)``. An async one may name them as it likes, since no factory is async."""
    if inspect.iscoroutinefunction(found):
        return True
    return inspect.isfunction(found) and list(inspect.signature(found).parameters)[:2] == ["task", "llm"]


def _adapted(ref: str, adapter: Callable[..., Environment], config: Mapping[str, JSON]) -> Environment:
    try:
        inspect.signature(adapter).bind(ref, **config)
    except TypeError as error:
        raise InvalidEnvironment(f"{ref}: the config {sorted(config)} does not fit: {error}") from None
    try:
        return adapter(ref, **config)
    except InvalidEnvironment:
        raise
    except ModuleNotFoundError as error:
        raise InvalidEnvironment(f"{ref} needs the module {error.name!r}, which is not installed") from error
    except Exception as error:
        raise UnreachableEnvironment(f"{ref} cannot be reached: {type(error).__name__}: {error}") from error


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidEnvironment(f"there is no module {error.name!r} on the import path") from error
        raise InvalidEnvironment(f"{name} needs the module {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise InvalidEnvironment(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _load_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if not path.is_file():
        raise InvalidEnvironment(f"there is no file {name} (looked for {path})")
    if str(path.parent) not in sys.path:  # for good: a tool may import when it is called
        sys.path.append(str(path.parent))
    # Registered under a name of its own while it runs: dataclasses and string annotations look their module up.
    module_name = f"gspo_environment_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidEnvironment(f"{name} cannot be read as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InvalidEnvironment(f"running {name} failed: {type(error).__name__}: {error}") from error
    return module


def _offers(module: ModuleType) -> str:
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    classes = sorted(name for name, value in own.items() if inspect.isclass(value))
    functions = sorted(name for name, value in own.items() if inspect.isfunction(value))
    said = f"its classes are {classes}" if classes else "it defines no class"
    return f"{said}, its functions are {functions}" if functions else said
