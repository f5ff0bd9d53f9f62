"""Where an environment comes from, in a caller's words, and what a host loads for it.

Rule: every address in a caller's words is judged before it is kept. It imports nothing and connects to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from gspo_core.documented import FreeForm
from gspo_core.outbound import MAX_URL_CHARS, Network, check_url
from gspo_core.spec import AgentSpec
from services.files.environments.named_urls import check_urls, urls_in


def _of_a_module(ref: str) -> str:
    if ref.partition(":")[0].endswith(".py"):
        raise ValueError("files are uploaded; a reference names a module that is installed")
    return ref


ImportString = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$", max_length=512),
    AfterValidator(_of_a_module),
]
Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_CHARS)]
Tasks = Annotated[list[dict[str, JsonValue]], Field(max_length=10_000)]


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    config: FreeForm = Field(default_factory=dict)
    """Further keyword arguments of the class or of the adapter."""


class ReferenceSource(_Source):
    """A class that is installed where the rollout workers run."""

    type: Literal["reference"]
    ref: ImportString
    """`package.module:Class`."""


class OpenEnvSource(_Source):
    """A world behind an OpenEnv server."""

    type: Literal["openenv"]
    url: Url
    """The address of its WebSocket, `wss://HOST/ws`."""


class McpSource(_Source):
    """The tools of an MCP server, with tasks and a reward of our own."""

    type: Literal["mcp"]
    url: Url
    reward: ImportString
    """A function of the workers' installation: `package.module:function`."""
    tasks: Tasks
    """Each with a `prompt`."""
    eval_tasks: Tasks = []


class GymSource(_Source):
    """A Gymnasium environment with a discrete action space."""

    type: Literal["gym"]
    id: Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ReasoningGymSource(_Source):
    """A data set of reasoning-gym."""

    type: Literal["reasoning_gym"]
    dataset: Annotated[str, StringConstraints(min_length=1, max_length=200)]


Source = Annotated[
    ReferenceSource | OpenEnvSource | McpSource | GymSource | ReasoningGymSource, Field(discriminator="type")
]
SOURCES = ("reference", "openenv", "mcp", "gym", "reasoning_gym")


@dataclass(frozen=True, slots=True)
class Loadable:
    ref: str
    config: FreeForm
    url: str | None = None

    @property
    def is_remote(self) -> bool:
        """It reaches an address that a caller has named."""
        return self.url is not None or any(urls_in(self.config))


class ConfigRefused(ValueError):
    """The further arguments repeat, or replace, what the source says."""


def loadable(source: Source) -> Loadable:
    """Raises ConfigRefused."""
    match source:
        case ReferenceSource():
            return Loadable(source.ref, dict(source.config))
        case OpenEnvSource():
            return _adapter("environments.adapters.openenv:OpenEnv", source.config, source.url, {"url": source.url})
        case McpSource():
            # A command would be run on the workers' machine.
            _refuse(source.config, ("command",))
            own = source.model_dump(include={"url", "reward", "tasks", "eval_tasks"})
            return _adapter("environments.adapters.mcp:Mcp", source.config, source.url, own)
        case GymSource():
            return _adapter("environments.adapters.gym:gym", source.config, None, {"id": source.id})
        case ReasoningGymSource():
            ref = "environments.adapters.reasoning_gym:ReasoningGym"
            return _adapter(ref, source.config, None, {"name": source.dataset})


def _adapter(ref: str, further: FreeForm, url: str | None, own: FreeForm) -> Loadable:
    _refuse(further, tuple(own))
    return Loadable(ref, own | further, url)


def judge(found: Loadable, agent: AgentSpec | None, networks: Sequence[Network]) -> None:
    """Raises AddressRefused. May ask a resolver: call it in a thread."""
    if agent is not None and agent.url is not None:
        check_url(agent.url, networks)
    if agent is not None and agent.judge is not None:
        check_url(agent.judge.url, networks)
    if found.url is not None:
        check_url(found.url, networks)
    check_urls(found.config, networks)


def _refuse(config: FreeForm, names: tuple[str, ...]) -> None:
    wrong = sorted(set(config) & set(names))
    if wrong:
        raise ConfigRefused(f"config does not take {', '.join(wrong)}")
