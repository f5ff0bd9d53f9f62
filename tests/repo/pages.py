"""What the pages tell people to type: fenced blocks, the commands in them, and commands in prose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("sh", "bash", "shell", "console")
# What begins a command in prose. A word alone ("`gspo`", "`make`") is a name and no command.
PROGRAMS = "gspo|make|pytest|python3?|docker|kubectl|curl|pip|hf|torchrun|sbatch|tensorboard|wandb sync|bash"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) \S")
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def typed(self) -> str:
        """Of a shell block, what is typed: all of it, or on a console what follows the prompts."""
        if self.language != "console":
            return self.text
        return "".join(f"{line[2:]}\n" for line in self.text.splitlines() if line.startswith("$ "))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.partition(chr(10))[0]}"


@cache
def pages() -> tuple[Path, ...]:
    built = {"dist"}
    folders = [one for one in ROOT.iterdir() if one.is_dir() and not one.name.startswith(".") and one.name not in built]
    return tuple(sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def blocks() -> tuple[Block, ...]:
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(name(page), line, match[2], match[3]))
    return tuple(found)


def block(page: str, containing: str) -> Block:
    (found,) = [one for one in blocks() if one.page == page and containing in one.text]
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """What stands between backticks; one that goes on in the next line is joined."""
    return [" ".join(one.split()) for one in re.findall(r"`([^`]+?)`", prose(page))]


def commands_in_prose(page: Path) -> list[str]:
    """With alternatives (`gspo env list|show`) spelled out."""
    return [one for span in spans(page) if _COMMAND.match(span) for one in _alternatives(span)]


def _alternatives(span: str) -> list[str]:
    word = re.search(r"(?<=\s)\w+(?:\|\w+)+", span)
    return [span.replace(word[0], one) for one in word[0].split("|")] if word else [span]


def simple_commands(text: str) -> Iterator[list[str]]:
    """The commands of a piece of shell, each as its words with assignments before them; redirections are left out."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    redirected = False
    for token in [*lexer, ";"]:
        if set(token) <= set("();&|"):
            if words := list(dropwhile(lambda word: word in ("do", "then", "export"), words)):
                yield words
            words = []
        elif set(token) <= set("<>"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(token)


def without_comments(text: str) -> str:
    return re.sub(r"(?:^|[ \t]+)#(?: .*)?$", "", text, flags=re.MULTILINE)
