"""The environments of a submitted job: registered ones pinned to a version, addresses judged.

Rule: an accepted job names versions that exist, that its caller may see and that no examination refused; it stores
`name@version`, so that later registrations do not change it. A URL in the config of a class that the job itself names
is judged like a registered one; the host judges every address again when it connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gspo_core.outbound import Network
from gspo_core.spec import EnvironmentSpec, JobSpec
from services.api.http.access import Caller
from services.api.http.errors import RequestRefused
from services.hosts.named_urls import AddressNamed, Share, check_urls
from services.hosts.registry import EnvironmentNotFound, EnvironmentRegistry
from services.state.jobs import JobRecord

# Of the findings of an examination; GET /v1/environments/NAME has all of them.
MAX_WHY_CHARS = 1000
Spec = TypeVar("Spec", bound=JobSpec)


def pin(spec: Spec, registry: EnvironmentRegistry | None, caller: Caller, networks: Sequence[Network]) -> Spec:
    """Blocking where there are files to read or addresses to resolve: then call it in a thread."""
    entries, share = [], Share()
    for index, entry in enumerate(spec.environments):
        param = f"environments[{index}]"
        if entry.agent is not None and entry.agent.url is not None:
            _judge_agent(entry.agent.url, f"{param}.agent.url", networks, share)
        if ":" in entry.ref:
            _judge(entry, param, networks, share)
            entries.append(entry)
        else:
            entries.append(_pinned(param, entry, registry, caller))
    return spec.model_copy(update={"environments": tuple(entries)})


def pinned_as(spec: Spec, held: JobRecord) -> Spec:
    """With the versions of the earlier job, where both name the same environments."""
    refs = [str(entry.get("ref")) for entry in held.spec_data.get("environments", ())]
    if len(refs) != len(spec.environments):
        return spec
    entries = [
        entry.model_copy(update={"ref": ref}) if ref.startswith(f"{entry.ref}@") else entry
        for entry, ref in zip(spec.environments, refs, strict=True)
    ]
    return spec.model_copy(update={"environments": tuple(entries)})


def _judge(entry: EnvironmentSpec, param: str, networks: Sequence[Network], share: Share) -> None:
    try:
        check_urls(entry.config, networks, share)
    except AddressNamed as error:
        message = f"{error} (GSPO_OUTBOUND_NETWORKS)"
        raise RequestRefused(422, "address_refused", message, param=f"{param}.{error.where}") from None


def _judge_agent(url: str, param: str, networks: Sequence[Network], share: Share) -> None:
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
    if entry.config:
        message = f"{one.id} has its own config; register another version to change it"
        raise RequestRefused(422, "validation_failed", message, param=f"{param}.config")
    report = registry.report(one)
    if report is not None and not report["ok"]:
        why = "; ".join(f"{check['id']}: {check['message']}" for check in report["checks"] if check["status"] == "fail")
        message = f"{one.id} was examined and rejected: {why[:MAX_WHY_CHARS]}"
        raise RequestRefused(422, "environment_invalid", message, param=f"{param}.ref")
    return entry.model_copy(update={"ref": one.id})
