"""The processes of an installation: how each starts, what it needs, how to probe it, and how it stops.

Every launcher reads it: ``stack`` (``gspo up``) and the modules in ``launchers`` (``gspo launch``). So does
a test that holds docker-compose.yml, the Dockerfile and k8s/ to it. Rule: it is data. It starts nothing, reads no
environment variable, and imports nothing outside the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SETTING_PREFIX = "GSPO_"
# Cleanup time that services.process.lifecycle gives a cancelled service before cancelling it again.
CLEANUP_S = 5


class Site(StrEnum):
    """Where an installation runs. Sites differ in which processes run apart and in how long shutdown may take."""

    LAPTOP = "laptop"
    """Children of one command, reachable over loopback only."""
    BATCH = "batch"
    """An allocation of a batch system; environments run beside the workers, under the user's account."""
    CONTAINERS = "containers"
    """Compose and Kubernetes; environments run isolated."""


class DataAccess(StrEnum):
    """How a process uses the shared data directory."""

    NONE = "none"
    READ = "read"
    WRITE = "write"


class Copies(StrEnum):
    ONE = "one"
    """One for the whole installation."""
    ANY = "any"
    PER_NODE = "per_node"
    """At least one on each machine that plays episodes."""


@dataclass(frozen=True)
class HttpHealth:
    """Paths on the process's port that answer 200 while it is alive (``live``) and able to serve (``ready``)."""

    live: str
    ready: str


@dataclass(frozen=True)
class FileHealth:
    """The process touches GSPO_HEALTH_FILE; ``python -m services.process.health FILE [--ready]`` examines it."""


@dataclass(frozen=True)
class PingHealth:
    """Redis answers PING."""


Health = HttpHealth | FileHealth | PingHealth


@dataclass(frozen=True)
class Leaving:
    """After SIGTERM a process drains and then cleans up; killing it before ``most_s`` loses work."""

    default_drain_s: int
    cleanup_s: int = CLEANUP_S
    option: str | None = None
    """Command-line option that sets the drain; None where it is fixed."""
    drain_s: Mapping[Site, int] = field(default_factory=dict)
    """The value of ``option`` per site; other sites use the default."""

    def arguments(self, site: Site) -> tuple[str, ...]:
        if self.option is None or site not in self.drain_s:
            return ()
        return self.option, str(self.drain_s[site])

    def most_s(self, site: Site) -> int:
        return self.drain_s.get(site, self.default_drain_s) + self.cleanup_s


@dataclass(frozen=True)
class Share:
    """What a batch system or a cluster reserves for a process, or for each rank or GPU of one."""

    cpus: int = 1
    memory_mb: int = 2048


API_HEALTH = HttpHealth(live="/healthz", ready="/readyz")
GATEWAY_HEALTH = HttpHealth(live="/healthz", ready="/readyz")
ENGINE_HEALTH = HttpHealth(live="/health", ready="/ready")
EVERYWHERE = frozenset(Site)
LOGGING = frozenset({"secrets_dir", "log_level", "log_format"})
# The settings of processes that start environments.
WALLS = frozenset(
    {"env_tier", "env_network", "env_readable", "env_writable", "sandbox_images", "sandbox_url", "sandbox_key"}
    | {"sandboxes_ready", "outbound_networks"}
)


@dataclass(frozen=True)
class Process:
    """One kind of process."""

    name: str
    leaving: Leaving
    module: str | None = None
    """Run as ``python -m MODULE``; None for a third-party program."""
    arguments: tuple[str, ...] = ()
    """The launcher fills in words in braces, such as ``{port}``."""
    reads: frozenset[str] = frozenset()
    """Fields of ``services.process.settings.Settings`` that it uses."""
    requires: frozenset[str] = frozenset()
    """Settings that a multi-machine installation must provide."""
    health: Health | None = None
    """None for a process that runs to completion."""
    after: tuple[str, ...] = ()
    """Processes that must be running, or finished, before this one starts."""
    calls: tuple[str, ...] = ()
    """Processes to which it opens connections."""
    data: DataAccess = DataAccess.NONE
    reads_models: bool = False
    on_device: bool = False
    """Computes with torch: gets the GPUs, or the cores."""
    has_secrets: bool = False
    """``services.launch.first_secrets`` makes a directory with its name, for GSPO_SECRETS_DIR."""
    port: int | None = None
    copies: Copies = Copies.ANY
    share: Share = Share()
    """The memory is what compose allows; more is given where a launcher is told so."""
    sites: frozenset[Site] = EVERYWHERE

    def command(self, python: str, site: Site, values: Mapping[str, str] | None = None, *more: str) -> list[str]:
        """The command line. ``values`` fills the words in braces; a missing one raises KeyError."""
        start = [] if self.module is None else [python, "-m", self.module]
        given = [_filled(word, values or {}) for word in self.arguments]
        return [*start, *given, *self.leaving.arguments(site), *more]

    def settings(self, values: Mapping[str, str]) -> dict[str, str]:
        """Environment variables for the entries of ``values`` (field name: value) that this process reads."""
        return {SETTING_PREFIX + name.upper(): value for name, value in values.items() if name in self.reads}

    @property
    def bind(self) -> str | None:
        """The setting with the ``HOST:PORT`` that it binds. Where whoever starts it listens there, ``--fd``."""
        return self._own_setting("bind")

    @property
    def url(self) -> str | None:
        """The setting with the URL under which it is reached."""
        return self._own_setting("url")

    def _own_setting(self, what: str) -> str | None:
        name = f"{self.name}_{what}"
        return name if name in self.reads else None


def _filled(word: str, values: Mapping[str, str]) -> str:
    return values[word[1:-1]] if word.startswith("{") and word.endswith("}") else word


SECRETS = Process(
    name="secrets",
    module="services.launch.first_secrets",
    arguments=("{secrets_dir}",),
    leaving=Leaving(0),
    copies=Copies.ONE,
    sites=frozenset({Site.BATCH, Site.CONTAINERS}),
)

REDIS = Process(
    name="redis",
    # Acknowledged writes are on disk, and nothing is evicted: docs/redis.md.
    arguments=("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"),
    leaving=Leaving(10, cleanup_s=0),
    health=PingHealth(),
    after=("secrets",),
    port=6379,
    copies=Copies.ONE,
)

ENGINE = Process(
    name="engine",
    module="services.engine",
    arguments=("--model", "{model}", "--host", "{host}", "--port", "{port}", "--threads", "{threads}"),
    leaving=Leaving(30),
    reads=LOGGING | {"engine_keys"},
    health=ENGINE_HEALTH,
    after=("secrets",),
    data=DataAccess.READ,
    reads_models=True,
    on_device=True,
    has_secrets=True,
    port=30000,
    copies=Copies.PER_NODE,
    share=Share(memory_mb=4096),
)

API = Process(
    name="api",
    module="services.api",
    leaving=Leaving(3, cleanup_s=3 + CLEANUP_S, option="--grace-s", drain_s={Site.CONTAINERS: 50}),
    reads=LOGGING
    | {"redis_url", "data_dir", "api_host", "api_port", "api_keys", "env_uploads", "outbound_networks", "lease_s"}
    | {"episodes_keep_days"},
    requires=frozenset({"redis_url", "data_dir", "api_host", "api_keys"}),
    health=API_HEALTH,
    after=("redis",),
    calls=("redis",),
    data=DataAccess.WRITE,
    has_secrets=True,
    port=8000,
    share=Share(memory_mb=1024),
)

ENVIRONMENTS = Process(
    name="environments",
    module="services.hosts.service",
    arguments=("--host", "{host}", "--port", "{port}"),
    leaving=Leaving(30),
    reads=LOGGING | WALLS | {"data_dir", "env_install", "env_token_sha256", "health_file"},
    requires=frozenset({"env_token_sha256", "health_file"}),
    health=FileHealth(),
    after=("secrets",),
    has_secrets=True,
    port=8010,
    sites=frozenset({Site.CONTAINERS}),
)

TRAINER = Process(
    name="trainer",
    module="services.trainer",
    leaving=Leaving(30, option="--grace-s", drain_s={Site.BATCH: 90, Site.CONTAINERS: 620}),
    reads=LOGGING
    | {
        "redis_url",
        "data_dir",
        "engine_urls",
        "engine_keys",
        "lease_s",
        "max_attempts",
        "yield_after_s",
        "redis_bytes_per_job",
        "health_file",
    }
    | {"wandb_project", "wandb_mode"},
    requires=frozenset({"redis_url", "data_dir", "engine_urls", "engine_keys", "health_file"}),
    health=FileHealth(),
    after=("redis",),
    calls=("redis", "engine"),
    data=DataAccess.WRITE,
    reads_models=True,
    on_device=True,
    has_secrets=True,
    share=Share(memory_mb=8192),
)

ROLLOUT = Process(
    name="rollout",
    module="services.rollout",
    leaving=Leaving(8, cleanup_s=12 + CLEANUP_S, option="--drain-s", drain_s={Site.BATCH: 20, Site.CONTAINERS: 320}),
    reads=LOGGING
    | {"redis_url", "data_dir", "engine_urls", "engine_keys", "lease_s", "health_file", "outbound_networks"}
    | {"env_install", "env_hosts", "env_token", "trace_endpoint", "trace_share"}
    | WALLS,
    requires=frozenset({"redis_url", "data_dir", "engine_urls", "env_hosts", "env_token", "health_file"}),
    health=FileHealth(),
    after=("redis", "environments"),
    calls=("redis", "engine", "environments"),
    data=DataAccess.READ,
    reads_models=True,
    has_secrets=True,
    copies=Copies.PER_NODE,
)

GATEWAY = Process(
    name="gateway",
    module="services.gateway",
    leaving=Leaving(8, cleanup_s=14 + CLEANUP_S, option="--drain-s", drain_s={Site.BATCH: 20, Site.CONTAINERS: 320}),
    reads=LOGGING
    | {
        "redis_url",
        "data_dir",
        "engine_urls",
        "engine_keys",
        "lease_s",
        "outbound_networks",
        "gateway_bind",
        "gateway_url",
    }
    | {
        "gateway_own_url",
        "traffic_keep_bytes",
        "traffic_keep_days",
        "traffic_redactor",
        "judge_keys",
        "env_install",
        "env_hosts",
        "env_token",
        "trace_endpoint",
        "trace_share",
    }
    | WALLS,
    requires=frozenset(
        {"redis_url", "data_dir", "engine_urls", "env_hosts", "env_token", "gateway_bind", "gateway_url"}
    ),
    health=GATEWAY_HEALTH,
    after=("redis", "environments"),
    calls=("redis", "engine", "environments"),
    data=DataAccess.READ,
    reads_models=True,
    has_secrets=True,
    port=8020,
    # Agents have one address: whichever answers there passes on what another one holds.
    copies=Copies.ANY,
)

PROCESSES = (SECRETS, REDIS, ENGINE, API, ENVIRONMENTS, TRAINER, ROLLOUT, GATEWAY)
"""In start order. They stop in reverse, so each can still reach what it needs for a clean shutdown."""

SGLANG = Process(
    name="sglang",
    arguments=("-m", "sglang.launch_server", "--model-path", "{model}", "--host", "{host}", "--port", "{port}"),
    leaving=Leaving(60),
    health=ENGINE_HEALTH,
    data=DataAccess.READ,
    reads_models=True,
    on_device=True,
    port=ENGINE.port,
    copies=Copies.PER_NODE,
)
"""Replaces ``ENGINE``; runs with the Python of its own virtual environment or image."""


VLLM = Process(
    name="vllm",
    arguments=(
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--host", "{host}", "--port", "{port}"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "gspo_vllm.WeightsFromFolder", "--disable-uvicorn-access-log"),
    ),
    leaving=Leaving(60),
    # It has no path that says whether it is paused; its kind in services.engines asks for that.
    health=HttpHealth(live="/health", ready="/health"),
    data=DataAccess.READ,
    reads_models=True,
    on_device=True,
    port=ENGINE.port,
    copies=Copies.PER_NODE,
    sites=frozenset({Site.LAPTOP}),
)
"""Replaces ``ENGINE`` on one machine: whoever reaches its port may control it, with or without a key."""


def ranks_command(
    python: str, site: Site, ranks: int, *, address: str, port: int, nodes: int = 1, number: int = 0
) -> list[str]:
    """The ranks of a trainer on the node with this ``number`` of ``nodes``; they meet at ``address`` of the first.

    No rendezvous of torchrun's own: those exchange pickles.
    """
    assert TRAINER.module is not None
    place = ["--nnodes", str(nodes), "--node-rank", str(number), "--nproc-per-node", str(ranks)]
    meeting = ["--master-addr", address, "--master-port", str(port)]
    leaving = ["--max-restarts", "100", "--shutdown-timeout", str(TRAINER.leaving.most_s(site))]
    module = ["--module", TRAINER.module, *TRAINER.leaving.arguments(site)]
    return [python, "-m", "torch.distributed.run", *place, *meeting, *leaving, *module]


ALIKE = frozenset({"lease_s", "outbound_networks"})
"""Settings that need the same value in all processes that read them."""


def processes(site: Site, *, has_engines: bool = False) -> tuple[Process, ...]:
    """The processes to start at ``site``, in order. ``has_engines``: engines already run, so start none."""
    return tuple(one for one in PROCESSES if site in one.sites and not (has_engines and one is ENGINE))


def find(name: str) -> Process:
    """Raises StopIteration for an unknown name."""
    return next(one for one in PROCESSES if one.name == name)


def readers(setting: str) -> tuple[str, ...]:
    """The processes that read it, in start order."""
    return tuple(one.name for one in PROCESSES if setting in one.reads)


def leaving_s(site: Site) -> int:
    """Maximum shutdown time in seconds when processes stop one kind after another."""
    return sum(one.leaving.most_s(site) for one in processes(site))
