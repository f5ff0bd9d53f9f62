"""The chain of digests of a job's past, as one small file: base model, specification, and of each step the batch that
it was trained on and the weights that were published after it.

The rule: a link's digest is over the link and the digest before it, so the last one, the head, stands for all of the
past: anyone who has kept or signed the head notices any change before it. Pure: no file is opened here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gspo_core.json_value import JSON
from gspo_core.log import layout
from gspo_core.replay.past import PastError

FORMAT = 1


class BadChain(PastError):
    """The file is no chain, or was changed since it was written; the message names the link."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version."""

    manifest: str
    """sha256 of the manifest beside the weights, which names each file with its own."""
    record: str
    """sha256 of its record."""


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where the first link starts."""

    kind: str
    """``base``: the base model; ``checkpoint``; ``parent``: the step of another job that a fork begins after."""
    step: int
    files: dict[str, str]
    """sha256 of each file."""
    published: dict[str, Published]
    """Each version of that step, by number."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One step."""

    step: int
    epoch: int
    batch: str
    """sha256 of its batch log."""
    erased: list[str]
    """Its episodes that were erased since."""
    published: dict[str, Published]
    """Each version that was published after it, by number."""


@dataclass(frozen=True, slots=True)
class Chain:
    job: str
    accepted: str
    """sha256 of the record of its specification."""
    start: ChainStart
    links: tuple[ChainLink, ...]

    @property
    def head(self) -> str:
        return digests_of(self)[-1]

    @property
    def stages(self) -> tuple[ChainStart | ChainLink, ...]:
        """The beginning and the links."""
        return (self.start, *self.links)

    @property
    def last(self) -> int:
        """The step that it leads to."""
        return self.links[-1].step if self.links else self.start.step


def digests_of(chain: Chain) -> list[str]:
    """One for the beginning, and one for each link."""
    found = [_digest({"format": FORMAT, "job": chain.job, "accepted": chain.accepted, "start": asdict(chain.start)})]
    for link in chain.links:
        found.append(_digest({"before": found[-1], **asdict(link)}))
    return found


def encode_chain(chain: Chain) -> bytes:
    first, *rest = digests_of(chain)
    record: dict[str, JSON] = {
        "format": FORMAT,
        "job": chain.job,
        "accepted": chain.accepted,
        "start": {**asdict(chain.start), "digest": first},
        "links": [{**asdict(link), "digest": digest} for link, digest in zip(chain.links, rest, strict=True)],
    }
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def decode_chain(data: bytes) -> Chain:
    """Raises BadChain."""
    try:
        record = json.loads(data)
        if record["format"] != FORMAT:
            raise BadChain(f"the chain has format {record['format']}, this release reads {FORMAT}")
        told = [record["start"].pop("digest"), *(link.pop("digest") for link in record["links"])]
        links = tuple(_link(link) for link in record["links"])
        start = ChainStart(**{**record["start"], "published": _versions(record["start"])})
        chain = Chain(record["job"], record["accepted"], start, links)
        digests = digests_of(chain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadChain(f"the chain cannot be read: {type(error).__name__}: {error}") from error
    for place, digest in enumerate(digests):
        if digest != told[place]:
            raise BadChain(f"the chain is not what was written, from {_name(chain, place)} on")
    if encode_chain(chain) != data:
        raise BadChain("the chain is not spelled as it was written")
    return chain


def _link(record: dict[str, Any]) -> ChainLink:
    return ChainLink(record["step"], record["epoch"], record["batch"], record["erased"], _versions(record))


def _versions(record: dict[str, Any]) -> dict[str, Published]:
    return {version: Published(**one) for version, one in record["published"].items()}


def differences(older: Chain, newer: Chain) -> Iterator[str]:
    """Where ``newer``, a later chain of the same job, contradicts ``older``; links that only one has do not count."""
    if (older.job, older.accepted) != (newer.job, newer.accepted):
        yield f"the chain is of job {older.job}, or {layout.ACCEPTED} is another one"
        return
    found = {link.step: link for link in newer.links}
    if older.start.step == newer.start.step:
        files, others = older.start.files, newer.start.files
        other = [name for name in sorted(files.keys() | others.keys()) if files.get(name) != others.get(name)]
        if other or older.start.kind != newer.start.kind:
            yield f"the beginning ({older.start.kind}, step {older.start.step}): {', '.join(other) or 'another kind'}"
        yield from _differing_versions(older.start.published, newer.start.published)
    yield from (
        f"step {link.step}: {what}"
        for link in older.links
        if (now := found.get(link.step)) is not None
        for what in _differing(link, now)
    )


def _differing(link: ChainLink, now: ChainLink) -> Iterator[str]:
    if link.epoch != now.epoch:
        yield f"was taken by epoch {link.epoch}, now epoch {now.epoch} is said to have taken it"
    elif erased := sorted(set(now.erased) - set(link.erased)):
        yield f"episodes of it were erased since: {', '.join(erased)}"
    elif link.batch != now.batch:
        yield "its batch log is another one"
    yield from _differing_versions(link.published, now.published)


def _differing_versions(published: dict[str, Published], now: dict[str, Published]) -> Iterator[str]:
    for version in sorted(published, key=int):
        if version not in now:
            yield f"the record of version {version} is gone"
        elif now[version] != published[version]:
            yield f"version {version} is told otherwise"


def _name(chain: Chain, place: int) -> str:
    return f"step {chain.links[place - 1].step}" if place else "its beginning"


def _digest(record: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
