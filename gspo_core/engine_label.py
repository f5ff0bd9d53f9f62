"""The label of an engine's weights, ``JOB/EPOCH/VERSION``: built and parsed here and nowhere else.

Rule: a label that does not name all three is no label. Engines that serve no job carry names of their own ("default").
The loader of an engine's weights decides which label it carries.
"""

from __future__ import annotations

from dataclasses import dataclass


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
