"""What a step publishes: the files of a version, the label of the engines that hold it, and the report of the step.

Rule: a label is ``JOB/EPOCH/VERSION``, built and parsed here and nowhere else. One that does not name all three is no
label: engines that serve no job carry names of their own ("default"). The loader of an engine's weights decides which
label it carries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_core.invariants import InvalidValue, check_count, finite_mapping

_SHA256 = re.compile(r"[0-9a-f]{64}")


class NotALabel(ValueError):
    """The text is not ``JOB/EPOCH/VERSION``."""


@dataclass(frozen=True, slots=True)
class EngineLabel:
    """The weights of ``version``, published in ``epoch`` of ``job``."""

    job: str
    epoch: int
    version: int

    @classmethod
    def parse(cls, text: str) -> EngineLabel:
        """Raises ``NotALabel``."""
        job, _, rest = text.partition("/")
        epoch, _, version = rest.partition("/")
        if not (job and epoch.isdecimal() and version.isdecimal()):
            raise NotALabel(f"an engine that serves a job is labelled JOB/EPOCH/VERSION, not {text!r}")
        return cls(job, int(epoch), int(version))

    @classmethod
    def parse_or_none(cls, text: str) -> EngineLabel | None:
        """None for an engine that serves no job."""
        try:
            return cls.parse(text)
        except NotALabel:
            return None

    def __str__(self) -> str:
        return f"{self.job}/{self.epoch}/{self.version}"


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: str
    """Relative to the directory of the version, with ``/``."""
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = self.path.split("/") if type(self.path) is str else [""]
        if not {"", ".", ".."}.isdisjoint(parts):
            raise InvalidValue(f"the path of a weight file stays inside its version, {self.path!r} does not")
        check_count("size_bytes", self.size_bytes, 2**63 - 1)
        if type(self.sha256) is not str or not _SHA256.fullmatch(self.sha256):
            raise InvalidValue(f"a sha256 is 64 lower-case hexadecimal digits, not {self.sha256!r}")


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """What a published version consists of. Versions count publishes and are never reused."""

    job: str
    version: int
    epoch: int
    step: int
    files: tuple[WeightFile, ...]

    def __post_init__(self) -> None:
        if not self.files:
            raise InvalidValue("a version has at least one file")
        for name in ("version", "epoch", "step"):
            check_count(name, getattr(self, name))

    @property
    def label(self) -> str:
        """What an engine that holds these weights must report."""
        return str(EngineLabel(self.job, self.epoch, self.version))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything a person needs to trust a step. All numbers are finite; shares lie in [0, 1]."""

    step: int
    version: int
    """The version that this step published."""
    epoch: int
    metrics: Mapping[str, float]
    """Named as the metrics of the REST API, e.g. ``reward/mean``, ``gspo/clip_frac``, ``staleness/max``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", finite_mapping("metrics", self.metrics))
