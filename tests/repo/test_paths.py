"""No module outside the room of files builds a path below the data directory, or knows a name that stands there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("services", "gspo_core", "environments")
# The room of files, and the bytes of its files.
OWNERS = {
    path.relative_to(ROOT).as_posix()
    for folder in ("services/files", "gspo_core/log")
    for path in (ROOT / folder).glob("*.py")
}
# Variables that hold the data directory or a directory that it is divided into, and the nouns that name its paths.
DIRECTORIES = frozenset({"data_dir", "jobs_dir", "job_dir"})
NOUNS = frozenset({"DataDir", "JobsDir", "JobDir", "EnvironmentsDir", "KeysDir", "SecretsDir"})
FILES = frozenset(
    {"job.json", "metrics.jsonl", "checkpoint.json", "lineage.json", "manifest.json", "audit.jsonl", "engine.port"}
)
FOLDERS = frozenset(
    {
        *(
            "jobs",
            "batches",
            "trained",
            "weights",
            "checkpoints",
            "exports",
            "replays",
            "status",
            "versions",
            "tensorboard",
        ),
        *("environments", "keys", "secrets", "venvs", "redis", "logs", "models", ".uploads"),
    }
)
JOINING = frozenset({"joinpath", "join", "glob", "rglob", "with_name"})


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Line and reason of everything that belongs into the room of files."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if _is_owned(node.left):
                yield node.lineno, "joins to a directory that has an owner"
            if _first_part(node.right) in FOLDERS:
                yield node.lineno, f"names the folder {_first_part(node.right)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in JOINING:
            parts = [node.func.value, *node.args] if node.func.attr == "join" else [node.func.value]
            if any(_is_owned(part) for part in parts):
                yield node.lineno, f"calls {node.func.attr} on a directory that has an owner"
            if node.func.attr != "join" and any(_first_part(argument) in FOLDERS for argument in node.args):
                yield node.lineno, "names a folder"
        elif isinstance(node, ast.JoinedStr):
            yield from _in_text(node)
        elif isinstance(node, ast.Constant) and node.value in FILES:
            yield node.lineno, f"names the file {node.value}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "-step(" in node.value:
            yield node.lineno, "parses the name of a step"


def _in_text(node: ast.JoinedStr) -> Iterator[tuple[int, str]]:
    for value, rest in zip(node.values, node.values[1:], strict=False):
        text = rest.value if isinstance(rest, ast.Constant) else ""
        if isinstance(value, ast.FormattedValue) and str(text).startswith("/") and _is_owned(value.value):
            yield node.lineno, "joins text to a directory that has an owner"
    texts = [str(value.value) for value in node.values if isinstance(value, ast.Constant)]
    if any(text.endswith("-step") for text in texts) and texts[0].endswith("ep"):
        yield node.lineno, "writes the name of a step"


def _is_owned(node: ast.expr) -> bool:
    """Whether a path comes from a directory that has an owner, or from one of its nouns."""
    for one in ast.walk(node):
        name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
        if name.strip("_") in DIRECTORIES or name in NOUNS:
            return True
    return False


def _first_part(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        return _first_part(node.values[0]) if isinstance(node.values[0], ast.Constant) else ""
    return node.value.partition("/")[0] if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def modules() -> list[Path]:
    paths = (path for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py")))
    return [path for path in paths if path.relative_to(ROOT).as_posix() not in OWNERS]


def test_paths_below_the_data_directory_are_built_in_one_room() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for path in modules()
        for line, reason in offences(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_owners_are_there() -> None:
    """A name that stands for nothing would excuse nothing, and a test of nothing passes."""
    assert len(OWNERS) > 15
    assert len(modules()) > 250


@pytest.mark.parametrize(
    "source",
    [
        'x = settings.data_dir / "anything"',
        "x = settings.data_dir / name",
        'x = self._jobs_dir / job / "part"',
        "x = job_dir.path / name",
        "x = DataDir(root).logs / name",
        'x = root / "jobs"',
        'x = root / "weights/v1"',
        'x = root / f"keys/{name}"',
        'x = root.glob("checkpoints/*")',
        'x = root.joinpath("batches")',
        "x = os.path.join(config.data_dir, name)",
        'x = f"{config.data_dir}/part"',
        'NAME = "checkpoint.json"',
        'x = f"ep{epoch:06d}-step{step:06d}"',
        'NAME = re.compile(r"ep(\\d+)-step(\\d+)")',
    ],
)
def test_what_belongs_into_the_room_is_found(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        'raise StackError(f"cannot write to {config.data_dir} (full)")',
        'x = model_dir / "config.json"',
        "x = DataDir(settings.data_dir).jobs.job(name)",
        'store.set("jobs", num_jobs / 2)',
        'log.info("off-step by one")',
    ],
)
def test_what_is_no_path_of_ours_is_left_alone(source: str) -> None:
    assert not list(offences(source))
