"""Settings of the processes: the environment variables ``GSPO_*``, read here and nowhere else.

Duty: turn the environment into typed values. The rule: a bad value or a misspelt name is an error that names the
variable, never a silent default. It holds nothing that a job says for itself (that is ``JobSpec``) and no constants.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gspo_core.outbound import parse_networks

PREFIX = "GSPO_"
SECRETS_SETTING = f"{PREFIX}SECRETS_DIR"
_JUDGE_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}@[^\s/=@]+=[\x21-\x7e]+")
_ENGINE_KEY = re.compile(r"(admin@)?(\*|(\[[0-9a-fA-F:.]+\]|[^\s/=@:,*]+)(:[0-9]{1,5})?)=[\x21-\x7e]+")
_ENGINE_URL = re.compile(r"([a-z][a-z0-9-]*\+)?https?://[^\s,]+")
# Read by clients, agents and tests, never by a service.
_READ_ELSEWHERE = re.compile(r"GSPO_(URL|API_KEY|TASK|TEST_\w+)")


class SettingsError(ValueError):
    """An environment variable that we cannot use; the message names it."""


def _split(value: str | Sequence[str]) -> Sequence[str]:
    """``a,b`` -> ``("a", "b")``; blanks around the commas do not count."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class Settings(BaseSettings):
    """One field per environment variable: ``redis_url`` is ``GSPO_REDIS_URL``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, env_ignore_empty=True
    )

    redis_url: Annotated[str | None, Field(repr=False)] = None
    """The Redis (7.0 or newer) or Valkey (7.2 or newer) to use: ``redis://``, ``rediss://`` or ``unix://``.
    Unset: commands that can start a server as a child do so."""

    data_dir: Path = Path(".gspo")
    """Where jobs, weights, batch logs and the embedded Redis keep their files; made absolute. All processes of one
    installation share it."""

    api_host: str = "127.0.0.1"
    """The address that the API binds. Anything but loopback needs ``GSPO_API_KEYS``."""

    api_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port that the API binds; 0 picks a free one."""

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)] = ()
    """Bearer keys that the API accepts, separated by commas. Without any, only loopback is served."""

    engine_urls: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Base URLs of the inference engines, separated by commas, such as ``http://127.0.0.1:30000``; ``KIND+http://``
    names another kind of engine than the default one."""

    engine_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)] = ()
    """Keys of engines, ``PLACE=KEY`` each, separated by commas; PLACE is ``HOST:PORT``, ``HOST`` or ``*``, and
    ``admin@PLACE=KEY`` is for control calls (weights, pauses, aborts) where an engine has a separate key for them.
    Services send them to engines; the embedded engine asks for its own."""

    env_install: bool = False
    """Whether rollout workers install the requirements in an environment's file (``# /// script``), below
    ``GSPO_DATA_DIR/venvs``. Installing runs code from a package index."""

    allow_downloads: bool = False
    """Whether ``gspo up --model OWNER/NAME`` fetches a model of the Hugging Face hub that is not below
    ``GSPO_DATA_DIR/hub``. ``gspo fetch`` needs no leave, and a job never makes the service download anything."""

    env_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Services that run environments (``python -m services.hosts.service``), ``HOST:PORT`` each, separated by commas.
    Unset: rollout workers and gateways run environments and agents in processes beside themselves."""

    env_token: SecretStr | None = None
    """The token that rollout workers and gateways present to ``GSPO_ENV_HOSTS``."""

    env_token_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
    """The SHA-256 of ``GSPO_ENV_TOKEN``, for the service that runs environments: it holds no secret itself."""

    env_tier: Literal["process", "wall", "container", "remote"] | None = None
    """The least that stands between environments and the machine: ``process`` (a process of the service's account, also
    for uploaded code), ``wall`` (a file system, processes and network of their own), ``container`` (a wall, and a
    container for what a policy runs in an episode) or ``remote`` (a wall, and a sandbox elsewhere). Unset: ``wall``
    where the kernel allows it; elsewhere ``process``, which is logged as an error, and uploaded code is refused."""

    sandbox_images: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Images that containers of the tier ``container`` are made of, separated by commas; the first is meant where none
    is asked for. They must be on the machine: none is fetched."""

    sandbox_url: str | None = None
    """The server of sandboxes of the tier ``remote``. It must be public, or in ``GSPO_OUTBOUND_NETWORKS``."""

    sandbox_key: SecretStr | None = None
    """The key that is shown to ``GSPO_SANDBOX_URL``."""

    sandbox_key_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
    """The SHA-256 of ``GSPO_SANDBOX_KEY``, for ``python -m services.hosts.sandboxes``."""

    sandboxes_ready: Annotated[int, Field(ge=0, le=64)] = 0
    """Sandboxes of the tiers ``container`` and ``remote`` that each process which starts environments prepares ahead,
    for each image that was asked for."""

    env_network: bool = False
    """Whether a job may ask for the network on behalf of an environment (``environments[i].host.network``). Agents, and
    environments that a URL is given to, have it anyway."""

    env_readable: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split)] = ()
    """Paths that every environment may read behind its wall, separated by commas, such as data sets. The system's
    programs, Python and the folders of code are shown anyway."""

    env_writable: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split)] = ()
    """Paths that every environment may write behind its wall, separated by commas."""

    secrets_dir: Path | None = None
    """A directory of files named like settings in lower case (``gspo_redis_url``), each with one value, such as a
    mounted secret. Environment variables take precedence."""

    health_file: Path | None = None
    """A file that a rollout worker, a trainer or an environment service touches while it is alive; for ``python -m
    services.process.health FILE``."""

    env_uploads: bool = False
    """Whether the API accepts uploaded environments. Their code runs in hosts of the rollout workers, behind a wall;
    where there is none, it is refused (``GSPO_ENV_TIER``)."""

    outbound_networks: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Networks such as ``10.1.0.0/16``, separated by commas, that environments behind a registered URL, agents behind
    one, and judges may be in. Without any, only public addresses are allowed. Must be the same for the API, the rollout
    workers and the gateway."""

    gateway_bind: Annotated[str, Field(pattern=r"^[^\s/]+:[0-9]{1,5}$")] = "127.0.0.1:8020"
    """The address that a gateway binds, ``HOST:PORT``. It answers agents only, each with a key for its episode."""

    gateway_url: str | None = None
    """The base URL under which agents reach the gateway, such as ``https://gateway.example``. Unset: ``http://`` and
    ``GSPO_GATEWAY_BIND``."""

    gateway_own_url: str | None = None
    """The base URL of this one gateway, where there are several: for its neighbours, which pass requests on to it, and
    for agents in ``GSPO_ENV_HOSTS``, which it starts. Unset: ``http://`` and ``GSPO_GATEWAY_BIND``, with the name of
    the machine where that binds all addresses; agents are then given ``GSPO_GATEWAY_URL``."""

    traffic_keep_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """The most bytes of recorded traffic (of keys that talk without an episode) that are kept in Redis for one job. The
    oldest goes first."""

    traffic_keep_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Recorded traffic that is older than this is removed, within ten minutes where a gateway runs."""

    episodes_keep_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What was read and said in trained episodes is erased from batch logs that were written before that, within an
    hour where an API runs, as ``gspo erase`` does: such steps are never trained or replayed again. What a job that is
    not over may have to train again stays until its next checkpoint. Unset: it is kept as long as its log."""

    traffic_redactor: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """``module:function`` of yours, ``str -> str``, through which the text of recorded traffic goes before it is
    stored; token ids are then not kept. The gateway imports it. Unset: traffic is kept as it was sampled."""

    judge_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)] = ()
    """API keys of models that judge episodes (``agent.judge``), ``NAME@HOST=KEY`` each, separated by commas, such as
    ``mine@api.example=sk-1``. Jobs name them; each is sent to its host alone, ``HOST:PORT`` where the port is no usual
    one."""

    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds without a heartbeat after which a worker's episodes, or a trainer's job, go to another. Must be the same
    everywhere."""

    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Trainers in a row that may be lost without a new step before the job fails. Raise it where trainers are preempted
    often; one that is stopped by SIGTERM does not count."""

    yield_after_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0
    """Seconds without progress of a job (no step ends and no piece of an episode arrives) after which its trainer goes
    to another job that waits for one; the job comes back when its turn comes. It must exceed the time that the longest
    step takes."""

    redis_bytes_per_job: Annotated[int, Field(gt=0)] | None = None
    """Bytes that one job may hold in Redis, reserved before an episode starts. Groups beyond one step's worth wait.
    Unset: no limit."""

    trace_endpoint: str | None = None
    """Where rollout workers send OpenTelemetry traces of their episodes: OTLP over HTTP, such as
    ``http://127.0.0.1:4318/v1/traces``. Needs the extra ``otel``. Unset: nothing is traced."""

    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of the episodes that are traced."""

    wandb_project: str | None = None
    """The Weights & Biases project that receives the metrics of every job. Needs the extra ``wandb``. Unset: nothing is
    sent."""

    wandb_mode: Literal["online", "offline"] = "online"
    """``offline`` stores the data in the job's directory instead of sending it, for ``wandb sync``."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""

    log_format: Literal["console", "json"] | None = None
    """Format of log lines: for people, or one JSON object per line. Unset: for people on a terminal, else JSON."""

    @property
    def own_places(self) -> tuple[Path, ...]:
        """Directories that no code of others has any business with."""
        return (self.data_dir,) if self.secrets_dir is None else (self.data_dir, self.secrets_dir.absolute())

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("engine_urls")
    @classmethod
    def _engine_scheme(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return engine_addresses(value)

    @field_validator("engine_keys")
    @classmethod
    def _keys_with_places(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_ENGINE_KEY.fullmatch(one.get_secret_value()) for one in value):
            raise ValueError("every key must be PLACE=KEY or admin@PLACE=KEY, PLACE being HOST:PORT, HOST or *")
        return value

    @field_validator("judge_keys")
    @classmethod
    def _named_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_JUDGE_KEY.fullmatch(one.get_secret_value()) for one in value):
            raise ValueError("every key must be NAME@HOST=KEY, NAME of small letters, digits, - and _")
        return value

    @field_validator("gateway_url", "gateway_own_url")
    @classmethod
    def _gateway_scheme(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return None if value is None else value.rstrip("/").removesuffix("/v1")

    @field_validator("gateway_bind")
    @classmethod
    def _gateway_port(cls, value: str) -> str:
        if int(value.rpartition(":")[2]) >= 2**16:
            raise ValueError("the port must be below 65536")
        return value

    @field_validator("env_hosts")
    @classmethod
    def _host_and_port(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError("every address must be HOST:PORT")
        return value

    @field_validator("outbound_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_networks(value)
        return value

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: str | None) -> str | None:
        return value.lower() if isinstance(value, str) else value


def engine_addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Base URLs of engines as all parts of the system spell them. Raises ValueError."""
    for url in urls:
        if not _ENGINE_URL.fullmatch(url):
            raise ValueError("every engine URL must start with http:// or https://, optionally with KIND+ before it")
        try:
            is_address = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError("every engine URL must be http://HOST:PORT, with a port between 1 and 65535")
    return tuple(url.rstrip("/") for url in urls)


def load_settings(*, is_typed: bool = False) -> Settings:
    """The settings of this process, or of a command that a person types, whose shell may have what clients read; raises
    SettingsError."""
    _refuse_misspelt(os.environ, _READ_ELSEWHERE.fullmatch if is_typed else lambda _: None)
    secrets = os.environ.get(SECRETS_SETTING)
    if secrets and not Path(secrets).is_dir():
        raise SettingsError(f"{SECRETS_SETTING}: {secrets} is not a directory")
    try:
        return Settings(_secrets_dir=secrets or None)
    except ValidationError as error:
        problems = [
            f"{PREFIX}{'.'.join(map(str, problem['loc'][:1])).upper()}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False)
        ]
        raise SettingsError("; ".join(problems)) from None


def _refuse_misspelt(environment: Mapping[str, str], may_be: Callable[[str], object]) -> None:
    """A name that is nearly one of ours is a typo; names far from ours belong to others (the Makefile has some)."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    for name in environment:
        near = get_close_matches(name, known, n=1, cutoff=0.9) if name.startswith(PREFIX) else []
        if near and name not in known and not may_be(name):
            whose = " (it is a client's: unset it for a service)" if _READ_ELSEWHERE.fullmatch(name) else ""
            raise SettingsError(f"{name} is not a setting; did you mean {near[0]}?{whose}")


def unread_names(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and that nothing reads: to be told, since they may be meant for us."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    ours = {name for name, value in environment.items() if name.startswith(PREFIX) and value}
    return sorted(name for name in ours - known if not _READ_ELSEWHERE.fullmatch(name))
