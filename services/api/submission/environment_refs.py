"""The environments of a submitted job: registered ones pinned to a version, addresses judged.

Rule: an accepted job names versions that exist, that its caller may see and that no examination refused; it stores
`name@version`, so that later registrations do not change it. A URL in the config of a class that the job itself names
is judged like a registered one; the host judges every address again when it connects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from gspo_core.json_value import JSON
from gspo_core.outbound import Network
from gspo_core.spec import AgentSpec, EnvironmentSpec, JobSpec
from services.api.http.access import Caller
from services.api.http.errors import RequestRefused
from services.files.environments.named_urls import AddressNamed, ResolverShare, check_urls
from services.files.environments.registry import EnvironmentNotFound, EnvironmentRegistry
from services.state.jobs import JobRecord

# An examination's findings are cut here; GET /v1/environments/NAME has all of them.
MAX_WHY_CHARS = 1000
Spec = TypeVar("Spec", bound=JobSpec)


def pin(spec: Spec, registry: EnvironmentRegistry | None, caller: Caller, networks: Sequence[Network]) -> Spec:
    """Blocking where there are files to read or addresses to resolve: then call it in a thread."""
    entries, share = [], ResolverShare()
    for index, entry in enumerate(spec.environments):
        param = f"environments[{index}]"
        if ":" in entry.ref:
            _judge(entry, param, networks, share)
        else:
            entry = _pinned(param, entry, registry, caller)
        entries.append(entry)
        if entry.agent is not None:
            _judge_agent(entry.agent, f"{param}.agent", networks, share)
    return _with(spec, entries)


def _with(spec: Spec, entries: Sequence[EnvironmentSpec]) -> Spec:
    """Agents that were registered may be news to what the rest of the job says. Raises RequestRefused."""
    pinned = spec.model_copy(update={"environments": tuple(entries)})
    if [one.agent for one in entries] == [one.agent for one in spec.environments]:
        return pinned
    try:
        return type(spec).model_validate(pinned.model_dump(exclude_unset=True))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "environments"
        raise RequestRefused(422, "validation_failed", str(first["msg"]), param=where) from None


def pinned_as(spec: Spec, held: JobRecord) -> Spec:
    """With the versions of the earlier job, where both name the same environments."""
    theirs = list(held.spec_data.get("environments", ()))
    if len(theirs) != len(spec.environments):
        return spec
    return _with(spec, [_as_held(entry, other) for entry, other in zip(spec.environments, theirs, strict=True)])


def _as_held(entry: EnvironmentSpec, held: Mapping[str, JSON]) -> EnvironmentSpec:
    ref, agent = str(held.get("ref")), held.get("agent")
    if ":" in ref or (ref != entry.ref and not ref.startswith(f"{entry.ref}@")):
        return entry
    entry = entry.model_copy(update={"ref": ref})
    is_plain = entry.agent is None or entry.agent == AgentSpec()
    return entry.model_copy(update={"agent": AgentSpec.model_validate(agent)}) if is_plain and agent else entry


def _judge(entry: EnvironmentSpec, param: str, networks: Sequence[Network], share: ResolverShare) -> None:
    try:
        check_urls(entry.config, networks, share)
    except AddressNamed as error:
        message = f"{error} (GSPO_OUTBOUND_NETWORKS)"
        raise RequestRefused(422, "address_refused", message, param=f"{param}.{error.where}") from None


def _judge_agent(agent: AgentSpec, param: str, networks: Sequence[Network], share: ResolverShare) -> None:
    if agent.url is not None:
        _judge_address(agent.url, f"{param}.url", networks, share)
    if agent.judge is not None:
        _judge_address(agent.judge.url, f"{param}.judge.url", networks, share)


def _judge_address(url: str, param: str, networks: Sequence[Network], share: ResolverShare) -> None:
    try:
        check_urls({"url": url}, networks, share)
    except AddressNamed as error:
        message = f"{str(error).partition(': ')[2]} (GSPO_OUTBOUND_NETWORKS)"
        raise RequestRefused(422, "address_refused", message, param=param) from None


def _pinned(
    param: str, entry: EnvironmentSpec, registry: EnvironmentRegistry | None, caller: Caller
) -> EnvironmentSpec:
    try:
        if registry is None:
            raise EnvironmentNotFound(entry.ref)
        one = registry.get(entry.ref)
        if one.owner and not caller.sees(one.owner):
            raise EnvironmentNotFound(entry.ref)
    except EnvironmentNotFound as error:
        raise RequestRefused(422, "environment_not_found", str(error), param=f"{param}.ref") from None
    agent = entry.agent if one.agent is None else AgentSpec.model_validate(one.agent)
    if entry.agent not in (None, AgentSpec(), agent):
        message = f"{one.id} has its own agent; register another version to change it"
        raise RequestRefused(422, "validation_failed", message, param=f"{param}.agent")
    if entry.config:
        message = f"{one.id} has its own config; register another version to change it"
        raise RequestRefused(422, "validation_failed", message, param=f"{param}.config")
    report = registry.report(one)
    if report is not None and not report["ok"]:
        why = "; ".join(f"{check['id']}: {check['message']}" for check in report["checks"] if check["status"] == "fail")
        message = f"{one.id} was examined and rejected: {why[:MAX_WHY_CHARS]}"
        raise RequestRefused(422, "environment_invalid", message, param=f"{param}.ref")
    return entry.model_copy(update={"ref": one.id, "agent": agent})
