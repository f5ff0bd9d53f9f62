"""TOML, with the line of every key.

One rule: what a text means is decided by the standard library's reader alone; the search for lines beside it serves
error messages only and may miss keys, never move them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_core.strict_json import TextRejected

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=\s*(.*)")


def parse(text: str) -> dict[str, Any]:
    """The table that the text describes."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        if place is None:
            raise TextRejected(message[:1].lower() + message[1:]) from None
        line, column = (int(place[1]), int(place[2])) if place[1] else _end(text)
        message = message[: place.start()]
        raise TextRejected(message[:1].lower() + message[1:], line, column) from None
    except RecursionError:
        raise TextRejected("nested too deeply") from None


def key_lines(text: str) -> Mapping[tuple[str | int, ...], int]:
    """The line of each table, list item that is a table, and key, by its path."""
    found: dict[tuple[str | int, ...], int] = {}
    counts: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in _outside_of_values(text):
        if header := _HEADER.match(line):
            table = _header_path(header[1] == "[[", _keys(header[2]), counts)
            found.setdefault(table[:-1] if isinstance(table[-1], int) else table, number)
            found[table] = number
        elif assignment := _ASSIGNMENT.match(line):
            found[(*table, *_keys(assignment[1]))] = number
    return found


def _header_path(is_list: bool, keys: list[str], counts: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """The path of a table; on the way, a list means its newest item."""
    path: tuple[str | int, ...] = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if is_list and position == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _outside_of_values(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that do not begin within a value that spans lines."""
    closing, depth = "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not closing and depth <= 0:
            yield number, line
            depth = 0
            assignment = _ASSIGNMENT.match(line)
            rest = assignment[2] if assignment else ""
        else:
            rest = line
        closing, depth = _scan(rest, closing, depth)


def _scan(rest: str, closing: str, depth: int) -> tuple[str, int]:
    """The quotes that a piece of a value leaves open, and how many brackets."""
    position = 0
    while position < len(rest):
        if closing:
            end = rest.find(closing, position)
            if end < 0:
                return (closing if len(closing) == 3 else ""), depth
            position, closing = end + len(closing), ""
            continue
        character = rest[position]
        if character == "#":
            break
        if character in "\"'":
            closing = character * 3 if rest.startswith(character * 3, position) else character
            position += len(closing)
            continue
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        position += 1
    return closing if len(closing) == 3 else "", depth


def _keys(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_KEY, dotted)]


def _end(text: str) -> tuple[int, int]:
    lines = text.removesuffix("\n").split("\n")
    return len(lines), len(lines[-1]) + 1
