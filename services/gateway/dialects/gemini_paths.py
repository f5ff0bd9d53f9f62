"""Gemini's paths, which say what other dialects have in their bodies: the model, and whether the answer is a stream.

Rule: what a path says is read as fields of the request, and a body that says otherwise is refused. A model may have
slashes in its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gspo_core.json_value import JSON
from services.gateway.dialects.sent import FieldValue

PREFIX = "/v1beta/models"
# The other version of the API, whose models share their path with OpenAI's.
PREFIXES = (PREFIX, "/v1/models")
WHOLE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
VERBS = (WHOLE, STREAM, COUNT)


@dataclass(frozen=True, slots=True)
class GeminiPath:
    prefix: str
    model: str
    verb: str

    @property
    def known(self) -> str:
        """For logs: without the client's own words."""
        return f"{self.prefix}/{{model}}:{self.verb}"

    def fields(self) -> Mapping[str, JSON]:
        """Those that the path stands for."""
        return {"model": self.model, "stream": self.verb == STREAM}


def path_of(path: str) -> GeminiPath | None:
    """None where it is no path of a turn or a count."""
    prefix = next((one for one in PREFIXES if path.startswith(f"{one}/")), "")
    model, _, verb = path.removeprefix(f"{prefix}/").rpartition(":")
    return GeminiPath(prefix, model, verb) if prefix and model and verb in VERBS else None


def joined(body: JSON, fields: Mapping[str, JSON]) -> JSON:
    """The body with what its path says. Raises ``Refusal``."""
    if not isinstance(body, dict):
        return body  # whoever reads it says so
    for name, value in fields.items():
        said = body.get(name)
        if said is not None and said != value and said != f"models/{value}":
            raise FieldValue(said, name).fault("is not what the path of the request says")
    return {**body, **fields}
