"""Everything that is needed before an episode can start: a process's hosts and traces, a job's spec, environments and
chat codec.

Rule: anything that cannot be loaded is one typed error that names the change to make, in the job and not in the worker.
No code of an environment runs in this process: each gets a host (`services.hosts.session`), which ends with the job.
No setting is read here; each process passes those that it has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr, ValidationError

from gspo_core.chat import ChatCodec, load_codec
from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.job_spec import ChatSpec
from gspo_core.json_value import JSON
from gspo_core.model_files import problem_of
from gspo_core.spec import EnvironmentSpec, JobSpec
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.pool import Boot
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters
from services.process.telemetry import get_logger
from services.process.tracing import Traces, TracingUnavailable, open_traces


def boot_for(addresses: Sequence[str], token: SecretStr | None, interpreters: Interpreters, policy: WallPolicy) -> Boot:
    """Where environments and agents run: in services at ``addresses``, or beside this process."""
    if not addresses:
        policy.announce()
        return LocalHosts(interpreters, policy).boot
    if token is None:
        raise SystemExit("GSPO_ENV_TOKEN is not set: the services in GSPO_ENV_HOSTS require it")
    from services.hosts.remote import RemoteHosts  # most installations have their hosts beside their workers

    return RemoteHosts(addresses, token.get_secret_value()).boot


def traces_to(endpoint: str | None, process: str, name: str, *, share: float) -> Traces | None:
    if endpoint is None:
        return None
    try:
        return open_traces(endpoint, process, share=share, **{"service.instance.id": name})
    except TracingUnavailable as error:
        raise SystemExit(f"GSPO_TRACE_ENDPOINT is set, but {error}") from error


class JobNotServable(Exception):
    """This worker cannot play episodes of the job. Another worker, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    spec: JobSpec
    environments: Sequence[HostedEnvironment]
    codec: ChatCodec
    context_tokens: int
    """The most tokens that the model can read and write together."""
    vocab_size: int
    """The model's. Its tokenizer may know fewer ids."""

    @property
    def capacity(self) -> int:
        """How many episodes the environments can hold at once, if evenly spread."""
        return sum(environment.capacity for environment in self.environments)

    async def close(self) -> None:
        """Ends the hosts."""
        await _close(self.environments)


async def load_job(spec_text: str, count: Callable[[str], None], boot: Boot) -> LoadedJob:
    """Raises ``JobNotServable``. ``count`` hears what happens to the hosts later."""
    spec, codec, context_tokens, vocab_size = await asyncio.to_thread(_load, spec_text)
    environments: list[HostedEnvironment] = []
    try:
        for number, entry in enumerate(spec.environments):
            environments.append(await _host(entry, count, boot))
            spec.episode_limits(number, environments[-1].limits)
    except BaseException as error:
        await _close(environments)
        if isinstance(error, InvalidEnvironment):
            raise JobNotServable(str(error)) from error
        if isinstance(error, ValidationError):
            raise JobNotServable(f"the environment's author sets invalid limits: {error}") from error
        raise
    return LoadedJob(spec, environments, codec, context_tokens, vocab_size)


async def _close(environments: Collection[HostedEnvironment]) -> None:
    """All, whatever one of them raises: it must neither keep the others open nor take a cancellation's place."""
    for outcome in await asyncio.gather(*(one.close() for one in environments), return_exceptions=True):
        if isinstance(outcome, Exception):
            get_logger().error("an environment was not closed", exc_info=outcome)


async def _host(entry: EnvironmentSpec, count: Callable[[str], None], boot: Boot) -> HostedEnvironment:
    hosting = entry.host.model_dump(exclude_none=True, exclude={"boot_timeout_s"})
    agent = None if entry.agent is None else entry.agent.model_dump(exclude_none=True, exclude={"judge"})
    order = HostOrder(entry.ref, entry.config, hosting, boot_timeout_s=entry.host.boot_timeout_s, agent=agent)
    return await HostedEnvironment.open(order, count, boot)


def read_spec(text: str) -> JobSpec:
    """A stored specification. Raises ``JobNotServable``."""
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        raise JobNotServable(f"this worker cannot read the stored specification: {error}") from error


def _load(spec_text: str) -> tuple[JobSpec, ChatCodec, int, int]:
    spec = read_spec(spec_text)
    if spec.sampling.top_p != 1:
        raise JobNotServable(
            f"sampling.top_p is {spec.sampling.top_p}, but log-probs are over the whole vocabulary; set it to 1"
        )
    return spec, *read_model(Path(spec.model), spec.chat)


def read_model(model_dir: Path, chat: ChatSpec) -> tuple[ChatCodec, int, int]:
    """The chat format of a model, the most tokens that it can read and write, and the number of its ids.

    Raises ``JobNotServable``.
    """
    try:
        if (problem := problem_of(model_dir)) is not None:
            raise ValueError(problem)
        config: JSON = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        fields = config if isinstance(config, dict) else {}
        context_tokens = _number(fields, "max_position_embeddings")
        codec = load_codec(
            model_dir, format=chat.format, calls=chat.calls, thinking=chat.thinking, variables=chat.variables
        )
        vocab_size = _number(fields, "vocab_size")
        if (num_ids := codec.tokenizer.vocab_size) > vocab_size:
            # An id that its model does not have can crash an engine.
            raise ValueError(f"the tokenizer has {num_ids} ids, but the model only {vocab_size}")
        _check_ends(fields.get("eos_token_id"), codec.stop_ids)
    except (OSError, ValueError) as error:
        raise JobNotServable(f"the model directory {model_dir} cannot be used: {error}") from error
    return codec, context_tokens, vocab_size


def _check_ends(given: JSON, stop_ids: Collection[int]) -> None:
    """Engines also stop at the model's own end tokens; a turn that ends there must count as ended here."""
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if not all(end in stop_ids for end in ends):
        raise ValueError(f"its config.json has eos_token_id {given}, but the chat format ends turns with {stop_ids}")


def _number(config: Mapping[str, JSON], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ValueError(f"its config.json has no integer {name}")
    return value
