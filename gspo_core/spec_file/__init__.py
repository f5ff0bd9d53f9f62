"""A job specification from a JSON, YAML or TOML file.

One rule: the author of the file learns at once what is wrong and where: file, line, key, and what was probably meant. A
file that two readers could understand differently (a key given twice) is refused. It fetches nothing and runs nothing
that a file says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo_core import strict_json
from gspo_core.json_value import JSON
from gspo_core.problems import KeyPath, Problem, problems, spell
from gspo_core.spec import JobSpec
from gspo_core.spec_file import toml_text, yaml_text
from gspo_core.spec_sizes import size_problems
from gspo_core.strict_json import TextRejected

# A job is a page of text. More values than this come from a file that expands (YAML aliases of aliases).
MAX_BYTES = 1 << 20
MAX_VALUES = 50_000

Lines = Mapping[KeyPath, int]


class SpecFileError(ValueError):
    """A specification file cannot be used. Its text has one line for each thing that is wrong."""


@dataclass(frozen=True)
class _Format:
    read: Callable[[str], Any]
    """Raises TextRejected."""
    lines: Callable[[str], Lines]
    """The line of every key that it finds, counted from 1; empty where the text has no such structure."""


def load_job_spec(path: Path | str) -> JobSpec:
    """The specification in the file; its ending says the format: .json, .yaml, .yml or .toml."""
    path = Path(path)
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise SpecFileError(f"{path}: a job file must end in .json, .yaml, .yml or .toml, not in {path.suffix!r}")
    text = _text(path)
    try:
        data = form.read(text)
        _check_plain(data)
    except TextRejected as error:
        where = ":".join(str(part) for part in (path, error.line, error.column) if part is not None)
        raise SpecFileError(f"{where}: {error}") from None
    if not isinstance(data, dict):
        raise SpecFileError(f"{path}: a job must be written as keys and values, not as {_kind(data)}")
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecFileError(_report(path, problems(error, JobSpec, data), form.lines(text))) from None
    if too_large := size_problems(spec):
        raise SpecFileError(_report(path, too_large, form.lines(text)))
    return spec


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecFileError(f"{path}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise SpecFileError(f"{path}: larger than {MAX_BYTES} bytes, too large for a job specification")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecFileError(f"{path}:{line}: not UTF-8") from None


def _report(path: Path, wrong: Sequence[Problem], lines: Lines) -> str:
    found = []
    for problem in wrong:
        line = next((lines[problem.path[:n]] for n in range(len(problem.path), 0, -1) if problem.path[:n] in lines), 0)
        found.append((line, f"{path}:{line}: {problem.message}" if line else f"{path}: {problem.message}"))
    return "\n".join(text for _, text in found)


def _check_plain(data: Any) -> None:
    """Only what JSON can say passes: the specification travels as JSON."""
    pending: list[tuple[KeyPath, Any]] = [((), data)]
    count = 0
    while pending:
        path, value = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise TextRejected(f"holds more than {MAX_VALUES} values")
        if len(path) > strict_json.MAX_DEPTH:
            raise TextRejected(f"nested deeper than {strict_json.MAX_DEPTH} levels, or a value that contains itself")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TextRejected(f"{spell((*path, str(key)))}: a key must be a string; write it in quotes")
                pending.append(((*path, key), item))
        elif isinstance(value, list):
            pending += [((*path, position), item) for position, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise TextRejected(f"{spell(path)}: numbers must be finite, not {value}")
        elif value is not None and not isinstance(value, str | int | float):
            raise TextRejected(
                f"{spell(path)}: {_kind(value)} has no meaning here; write it in quotes if it is a string"
            )


def _kind(value: Any) -> str:
    names = {"NoneType": "nothing", "list": "a list", "str": "a string", "int": "a number", "float": "a number"}
    name = type(value).__name__
    return names.get(name, f"a {name}")


def _parse_json(text: str) -> JSON:
    try:
        return strict_json.parse(text)
    except TextRejected as error:
        if error.line is None and "twice" in str(error):  # the other reader knows where
            yaml_text.parse(_as_yaml(text))
        raise


def _as_yaml(text: str) -> str:
    """JSON is YAML but for tabs, which stand in JSON between values only."""
    return text.replace("\t", " ")


def _json_lines(text: str) -> Lines:
    return yaml_text.key_lines(_as_yaml(text))


_YAML = _Format(yaml_text.parse, yaml_text.key_lines)
_FORMATS = {
    ".json": _Format(_parse_json, _json_lines),
    ".yaml": _YAML,
    ".yml": _YAML,
    ".toml": _Format(toml_text.parse, toml_text.key_lines),
}
