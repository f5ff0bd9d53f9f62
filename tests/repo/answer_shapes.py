"""gspo_core/api_answers.py, written from the API's OpenAPI document (`make docs` writes it).

Rule: the models of answers in services/api are their only definition; what is said here is under which name the client
has a shape, where it says a type more exactly than the document, and which keys may be missing.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.api.app import create_app

FILE = Path(__file__).parents[2] / "gspo_core" / "api_answers.py"
HEAD = '''"""Shapes of the API's answers, as the client hands them on; ``make docs`` writes them from the API's models.

Rule: an answer stays the JSON object that it was, and a newer server may add keys, and words where some are listed:
those are ``str``. Nothing is validated here. What is ``NotRequired``, older releases or some processes do not say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

from gspo_core.answer_parts import NOT_LOADED as NOT_LOADED
from gspo_core.answer_parts import EnvironmentSource as EnvironmentSource
from gspo_core.answer_parts import Event as Event
from gspo_core.answer_parts import RoleFields
from gspo_core.answer_parts import Settings as Settings
from gspo_core.answer_parts import TrialCall as TrialCall
from gspo_core.answer_parts import TrialEntry as TrialEntry
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from gspo_core.environment_records import CheckRecord, EnvironmentDescription
'''

# NAME(WHAT IT EXTENDS)=SCHEMA; without a schema it is NAMEView, or else NAME. An answer of one of several schemas has
# keys that may be missing. A schema that is not here is JSON to the client.
SHAPES = """
Reason JobAttempt=AttemptView Parent Recorded Job PastEvent=EventView Plan ForkPlan RetrainPlan
ReplayPlan Replay ReplayDetail(Replay)
EpisodeSummary GroupSummary ShownMessage ShownCall ShownRequest ShownTurn EpisodeDetail(EpisodeSummary)
Taken TaskCounts=NumTasks OutsideDescription=Description
PublishedVersion=VersionView Checkpoint CheckpointFile CheckpointExport=ExportView CheckpointDetail(Checkpoint)
RegisteredEnvironment=EnvironmentView EnvironmentValidation=ReportView Trial TaskList=TasksView SchemaAnswer=SchemaView
Worker(RoleFields) Drain=DrainView|EngineDrainView
Lease EpisodeLease(Lease)=NewLeaseView TalkKey NewTalkKey(TalkKey)
Trace TraceDetail(Trace) Erased Entered InUse ErasedEpisodes
"""
EXACTLY = {
    "RegisteredEnvironment.source": "EnvironmentSource",
    "EnvironmentValidation.checks": "list[CheckRecord]",
    "Trial.transcript": "list[TrialEntry]",
    "SchemaAnswer.description": "EnvironmentDescription",
    "EpisodeDetail.tokens": "dict[str, list[str | float | None]] | None",
    "EpisodeLease.task": "dict[str, JSON]",
    "TraceDetail.turns": "list[ShownTurn]",
    "TraceDetail.tokens": "dict[str, list[JSON]] | None",
}
# Release 0.2.0 does not say them, or a commit after it; whoever adds a key to an answer of a release adds it here.
NOT_REQUIRED = {
    *("Parent.last", "Parent.without", "Job.environments", "Job.objective"),
    *("Plan.unchecked", "Plan.capacity", "Plan.memory"),
    *(
        "ShownTurn.shared_tokens",
        "ShownTurn.tokens_read_again",
        "ShownTurn.request",
        "EpisodeDetail.evidence",
        "EpisodeDetail.evidence_left_out",
    ),
    *("EpisodeLease.reward_key", "TraceDetail.tokens", "CheckpointExport.files", "CheckpointExport.written_at"),
}
DOCS = {
    "Drain": "A process that was asked to leave, or an engine to be left alone: engines alone have `state` and `job`.",
    "Erased": "How much recorded traffic is gone.",
}
PLAIN = {
    **{"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"},
    "object": "dict[str, JSON]",
}

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    found: dict[str, Schema] = create_app(contextlib.nullcontext).openapi()["components"]["schemas"]  # type: ignore[arg-type]
    return found


def shapes(document: dict[str, Schema]) -> Iterator[tuple[str, str, list[str]]]:
    """Each with what it extends and its schemas."""
    for one in SHAPES.split():
        heading, _, named = one.partition("=")
        name, _, base = heading.rstrip(")").partition("(")
        usual = f"{name}View" if f"{name}View" in document else name
        yield name, base or "TypedDict", (named or usual).split("|")


def written() -> str:
    document = schemas()
    found = list(shapes(document))
    kinds = {name: PLAIN.get(one.get("type", ""), "JSON") for name, one in document.items()}
    kinds |= {schema: name for name, _, several in found for schema in several}
    fields: dict[str, Schema] = {}
    text = HEAD
    for name, base, several in found:
        properties = [document[schema]["properties"] for schema in several]
        fields[name] = {key: one for each in properties for key, one in each.items()}
        about = _doc(DOCS.get(name) or document[several[0]].get("description", ""))
        text += f"\n\nclass {name}({base}):\n{about}" + "\n" * bool(about)
        for key, one in fields[name].items():
            if key in fields.get(base, ()):
                continue
            kind = EXACTLY.get(f"{name}.{key}") or _type(one, kinds)
            if f"{name}.{key}" in NOT_REQUIRED or not all(key in each for each in properties):
                kind = f"NotRequired[{kind}]"
            text += f"    {key}: {kind}\n" + _doc(f"{_words(one)} {one.get('description', '')}")
    return text


def _words(schema: Schema) -> str:
    """Those that there are today."""
    words = next((one["enum"] for one in (schema, *schema.get("anyOf", ())) if "enum" in one), [])
    return ", ".join(f"`{word}`" for word in words) + "." * bool(words)


def _doc(text: str) -> str:
    lines = textwrap.wrap(f'"""{" ".join(text.split())}"""', 116, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines) + "\n", "    ") if text.strip() else ""


def _type(schema: Schema, kinds: dict[str, str]) -> str:
    match schema:
        case {"$ref": str(path)}:
            return kinds[path.rpartition("/")[2]]
        case {"anyOf": several}:
            return " | ".join(_type(one, kinds) for one in several)
        case {"type": "array", "items": item}:
            return f"list[{_type(item, kinds)}]"
        case {"type": "object", "additionalProperties": dict() as value}:
            return f"dict[str, {_type(value, kinds)}]"
    return PLAIN[schema["type"]]
