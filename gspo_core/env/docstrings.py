"""What a docstring says of a function and its parameters, in the styles in use: Google, NumPy, Sphinx, Epydoc.

Rule: it never fails. A docstring in no known style has a description and no texts; a text is one line, whatever its
breaks. The types that a docstring may give are not read: hints are the truth.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ARGUMENTS = r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters)"
_OTHERS = (
    r"(?:Returns?|Raises|Yields?|Receives|Examples?|Notes?|Attributes|See Also|References|Warns|Warnings?|Todo|Methods)"
)
_GOOGLE_HEADER = re.compile(rf"^{_ARGUMENTS}\s*:\s*$")
_OTHER_GOOGLE_HEADER = re.compile(rf"^{_OTHERS}\s*:\s*$")
_GOOGLE_LINE = re.compile(r"^(\*{0,2}\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:\s*(.*)$")
_NUMPY_HEADER = re.compile(rf"^{_ARGUMENTS}\s*$")
_OTHER_NUMPY_HEADER = re.compile(rf"^{_OTHERS}\s*$")
_UNDERLINE = re.compile(r"^-{3,}\s*$")
_NUMPY_LINE = re.compile(r"^(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
# `:param name: text`, `:param type name: text`, `@param name: text`
_FIELD = re.compile(r"^[:@](?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*?\s)?(\*{0,2}\w+)\s*:\s*(.*)$")
_ANY_FIELD = re.compile(r"^[:@]\w+(?:\s[^:]*)?:")


@dataclass
class Docstring:
    description: str = ""
    """Its first paragraph."""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(function: object) -> Docstring:
    lines = (inspect.getdoc(function) or "").splitlines()
    return Docstring(_description(lines), {**_numpy_texts(lines), **_google_texts(lines), **_field_texts(lines)})


def _description(lines: list[str]) -> str:
    found: list[str] = []
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or _GOOGLE_HEADER.match(text) or _ANY_FIELD.match(text) or _is_numpy_header(lines, number):
            break
        found.append(text)
    return " ".join(found)


def _is_numpy_header(lines: list[str], number: int) -> bool:
    underlined = number + 1 < len(lines) and _UNDERLINE.match(lines[number + 1].strip())
    text = lines[number].strip()
    return bool(underlined and (_NUMPY_HEADER.match(text) or _OTHER_NUMPY_HEADER.match(text)))


def _google_texts(lines: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for header, line in enumerate(lines):
        if _GOOGLE_HEADER.match(line.strip()):
            texts |= _google_section(lines[header + 1 :], _indent(line))
    return texts


def _google_section(lines: list[str], depth: int) -> dict[str, str]:
    texts: dict[str, str] = {}
    name, name_depth = "", None
    for line in lines:
        indent = _indent(line)
        if not line.strip():
            continue
        if indent <= depth or _OTHER_GOOGLE_HEADER.match(line.strip()) or _GOOGLE_HEADER.match(line.strip()):
            break
        found = _GOOGLE_LINE.match(line.strip())
        if found and (name_depth is None or indent <= name_depth):
            name, name_depth = found[1].lstrip("*"), indent
            texts[name] = found[2].strip()
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


def _numpy_texts(lines: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for header, line in enumerate(lines):
        if _NUMPY_HEADER.match(line.strip()) and _is_numpy_header(lines, header):
            texts |= _numpy_section(list(_until_next_header(lines, header + 2)), _indent(line))
    return texts


def _until_next_header(lines: list[str], start: int) -> Iterator[str]:
    for number in range(start, len(lines)):
        if number + 1 < len(lines) and _UNDERLINE.match(lines[number + 1].strip()):
            return
        yield lines[number]


def _numpy_section(lines: list[str], depth: int) -> dict[str, str]:
    """Names stand at the section's own depth, several may share a text; what is indented describes them."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        found = _NUMPY_LINE.match(line.strip())
        if _indent(line) <= depth:
            names = [name.strip().lstrip("*") for name in found[1].split(",")] if found else []
            texts |= dict.fromkeys(names, "")
            continue
        for name in names:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


def _field_texts(lines: list[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    name = ""
    for line in lines:
        text = line.strip()
        found = _FIELD.match(text)
        if found:
            name = found[1].lstrip("*")
            texts[name] = found[2].strip()
        elif _ANY_FIELD.match(text) or not text:
            name = ""
        elif name:
            texts[name] = f"{texts[name]} {text}".strip()
    return texts


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
