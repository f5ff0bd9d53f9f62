"""What a step publishes: the files of a version, and the report of the step that made it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_core.engine_label import EngineLabel
from gspo_core.invariants import InvalidValue, check_count, finite_mapping

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
