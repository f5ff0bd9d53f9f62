"""How each member of an installation on several machines is started: its command and its settings.

Launchers that place processes elsewhere (``crew``) read it. Rule: it starts nothing and knows no batch system; it is
given addresses and ports, and secrets stay in files that only paths name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.files.data_dir import DataDir
from services.launch import topology
from services.launch.engine_command import EngineCommand
from services.launch.placement import Member
from services.launch.topology import Site

CODE = Path(__file__).parents[2]
"""Where processes that are started elsewhere find the code: a checkout, or the tree of an installed wheel."""
ANYWHERE = "0.0.0.0"  # noqa: S104  # members on other machines call; engines, Redis and the API have keys


@dataclass(frozen=True)
class Ports:
    """The first of each kind; a kind's further members have the ports after it, whatever machine they are on."""

    redis: int = 16379
    api: int = 18000
    gateway: int = 18020
    engine: int = 30000
    ranks: int = 29500


@dataclass(frozen=True)
class Installation:
    members: tuple[Member, ...]
    hosts: tuple[str, ...]
    """The address of each node."""
    data_dir: DataDir
    model: str
    python: str
    redis_server: str
    """Path of the server's program."""
    ports: Ports = Ports()  # frozen
    engine: EngineCommand | None = None
    site: Site = Site.BATCH

    @property
    def api_url(self) -> str:
        return f"http://{self.hosts[0]}:{self.ports.api}"

    def engine_url(self, member: Member) -> str:
        return f"http://{self.hosts[member.node]}:{self.ports.engine + member.index}"

    def engines(self) -> Iterator[Member]:
        return (one for one in self.members if one.process is topology.ENGINE)

    def command(self, member: Member) -> list[str]:
        process = member.process
        if process is topology.REDIS:
            return [self.redis_server, *self._redis_arguments(member), *process.command(self.python, self.site)]
        if process is topology.ENGINE:
            return self._engine_command(member)
        if len(member.gang) * member.ranks > 1:
            return topology.ranks_command(
                self.python,
                self.site,
                member.ranks,
                address=self.hosts[member.gang[0]],
                port=self.ports.ranks + member.index,
                nodes=len(member.gang),
                number=member.gang.index(member.node),
            )
        return process.command(self.python, self.site)

    def _redis_arguments(self, member: Member) -> list[str]:
        users = self.data_dir.secrets.secret("redis", "users.acl")
        where = ["--port", str(self.ports.redis), "--dir", str(self.data_dir.redis), "--aclfile", str(users)]
        # What it holds is there twice while it rewrites its file. Beyond what is reserved a batch system kills it, and
        # would again each time that it has read the same file; a refused write is waited for.
        return [*where, "--maxmemory", f"{member.memory_mb // 2}mb"]

    def _engine_command(self, member: Member) -> list[str]:
        values = {
            "model": self.model,
            "host": ANYWHERE,
            "port": str(self.ports.engine + member.index),
            "threads": str(member.share.cpus),
            "gpus": str(max(1, len(member.devices))),
            "config": str(self.data_dir.secrets.secret("engine", "sglang.yaml")),
        }
        if self.engine is not None:
            return self.engine.filled(values)
        device = ("--device", "cuda") if member.devices else ()
        return member.process.command(self.python, self.site, values, *device)

    def environment(self, member: Member) -> dict[str, str]:
        """Variables to set beside those that every process has."""
        process = member.process
        settings = {
            "data_dir": str(self.data_dir.path),
            "engine_urls": ",".join(self.engine_url(one) for one in self.engines()),
            "api_host": ANYWHERE,
            "api_port": str(self.ports.api),
        }
        for one in topology.PROCESSES:
            if one.bind is not None:
                settings[one.bind] = f"{ANYWHERE}:{getattr(self.ports, one.name)}"
            if one.url is not None:
                settings[one.url] = f"http://{self.hosts[0]}:{getattr(self.ports, one.name)}"
        if process.has_secrets:
            settings["secrets_dir"] = str(self.data_dir.secrets.of(process.name))
        own = self.engine.environment if process is topology.ENGINE and self.engine is not None else {}
        threads = member.share.cpus if process.on_device else 1
        return {
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **process.settings(settings),
            **own,
        }
