"""The part of a Dockerfile that can be followed without a container: WORKDIR, COPY and ENV.

Rule: nothing is executed. Every other instruction is named, so that an operator who provides its result can say so.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_COMMENT = re.compile(r"^\s*#")
_HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")
# They say something of the container alone, and nothing of the files in it.
_WITHOUT_EFFECT = frozenset({"LABEL", "MAINTAINER", "CMD", "EXPOSE"})


class CannotFollow(Exception):
    """The text says what, and needs the name of the task before it."""


@dataclass(frozen=True)
class CopiedFile:
    """One file or folder of the task, and where it goes; what lies in a folder goes there."""

    source: Path
    target: str


@dataclass
class Recipe:
    """What a Dockerfile says."""

    workdir: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[CopiedFile] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Instructions that are not followed."""


def read(path: Path) -> Recipe:
    """Raises ``CannotFollow``."""
    recipe = Recipe()
    for word, rest in _instructions(path.read_text(encoding="utf-8")):
        if word == "WORKDIR":
            recipe.workdir = _below(recipe.workdir, _plain(word, rest).strip("\"'"))
        elif word == "ENV":
            recipe.variables.update(_variables(rest))
        elif word == "COPY":
            recipe.copies += _copies(path.parent, recipe.workdir, rest)
        elif word not in _WITHOUT_EFFECT:
            recipe.others.append(word)
    if recipe.others.count("FROM") > 1:
        raise CannotFollow("its Dockerfile has several stages")
    return recipe


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = iter([line for line in text.splitlines() if line.strip() and not _COMMENT.match(line)])
    for line in lines:
        whole = line.strip()
        while whole.endswith("\\"):
            whole = whole[:-1] + " " + next(lines, "").strip()
        word, _, rest = whole.partition(" ")
        begun = _HEREDOC.search(rest)
        if begun and word.upper() == "COPY":
            raise CannotFollow("its Dockerfile copies a text that stands in it")
        yield word.upper(), rest.strip()
        if begun and word.upper() in ("RUN", "ADD"):
            while (body := next(lines, None)) is not None and body.strip() != begun[1]:
                continue


def _plain(word: str, text: str) -> str:
    if "$" in text:
        raise CannotFollow(f"its Dockerfile's {word} has a variable: {text}")
    return text


def _below(workdir: str, path: str) -> str:
    if not path.startswith("/") and not workdir:
        raise CannotFollow(f"its Dockerfile names {path} before an absolute WORKDIR")
    joined = PurePosixPath(workdir or "/") / path
    if ".." in joined.parts:
        raise CannotFollow(f"its Dockerfile names {path}")
    return str(joined)


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(_plain("ENV", rest))
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _copies(context: Path, workdir: str, rest: str) -> Iterator[CopiedFile]:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(_plain("COPY", rest))
    flags = [word for word in words if word.startswith("--") and not word.startswith(("--chown=", "--link"))]
    if flags:
        raise CannotFollow(f"its Dockerfile copies with {flags[0]}")
    *sources, target = [word for word in words if not word.startswith("--")]
    found = [path for source in sources for path in _matching(context, source)]
    into = _below(workdir, target)
    is_folder = target.endswith(("/", "/.")) or target == "." or len(found) > 1
    for path in found:
        yield CopiedFile(path, into if path.is_dir() or not is_folder else f"{into}/{path.name}")


def _matching(context: Path, source: str) -> Sequence[Path]:
    relative = source.lstrip("/")
    if ".." in PurePosixPath(relative).parts:
        raise CannotFollow(f"its Dockerfile copies {source}, which is outside of environment/")
    found = [context / one for one in sorted(glob.glob(relative, root_dir=context, include_hidden=True))]
    found = found if relative not in ("", ".") else [context]
    if not found:
        raise CannotFollow(f"its Dockerfile copies {source}, which is not there")
    return found
