"""One folder in the format of Harbor, read and checked once: what it says, and what it asks of a container.

Rule: what a task asks for and is not done here (an image, RUN steps, amounts of memory, ...) is refused by its name,
unless the configuration says that the machine provides it. Nothing is executed.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.harbor import dockerfile
from environments.harbor.places import Places, is_usable
from gspo_core.env import InvalidEnvironment

DEFAULT_WORKDIR = "/app"
DEFAULT_TIMEOUT_S = 600.0
"""Harbor's, of each of the three budgets."""
_DESCRIPTIVE = frozenset({"version", "schema_version", "metadata", "task", "source"})
_FOLLOWED = frozenset(
    {"environment.build_timeout_sec", "agent.timeout_sec", "verifier.timeout_sec", "verifier.env", "solution.env"}
)
_IMAGE = "environment.docker_image"
_NO_FILES = ("docker-compose.yaml", "docker-compose.yml", ".dockerignore")


@dataclass(frozen=True)
class Budgets:
    """Seconds for setting up, for all commands together, and for the tests."""

    boot_s: float
    run_s: float
    score_s: float


@dataclass(frozen=True)
class HarborTask:
    """``read_task`` makes one."""

    name: str
    folder: Path
    instruction: str
    workdir: str
    copies: tuple[dockerfile.CopiedFile, ...]
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    budgets: Budgets
    image: str
    """What its sandbox begins with, where that may be an image and nothing else provides it."""
    digest: str
    """Over all its files."""

    @property
    def has_solution(self) -> bool:
        return (self.folder / "solution" / "solve.sh").is_file()


def find_tasks(path: str) -> list[Path]:
    """The folders of a folder that are tasks, by name; the folder itself if it is one."""
    given = Path(path)
    if (given / "task.toml").is_file():
        return [given]
    found = sorted(one.parent for one in given.glob("*/task.toml"))
    if not found:
        raise InvalidEnvironment(f"{path} holds no task of Harbor: no folder in it has a task.toml")
    return found


def read_task(folder: Path, provided: Collection[str] = (), has_images: bool = False) -> HarborTask:
    """``has_images``: its sandbox can begin with one. Raises ``InvalidEnvironment``."""
    name = folder.resolve().name
    try:
        return _read(name, folder.resolve(), provided, has_images)
    except dockerfile.CannotFollow as error:
        raise InvalidEnvironment(f"task {name}: {error}, and no container is built here") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise InvalidEnvironment(f"task {name} cannot be read: {error}") from None


def _read(name: str, folder: Path, provided: Collection[str], has_images: bool) -> HarborTask:
    for needed in ("instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise InvalidEnvironment(f"task {name} has no {needed}")
    links = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_symlink()]
    if links:
        raise InvalidEnvironment(f"task {name} has a link, {links[0]}; its files must be its own")
    said = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    recipe = _recipe(name, folder / "environment")
    needs = [*dict.fromkeys(recipe.others), *_asked(said)]
    image = str(said["environment"]["docker_image"]) if has_images and _IMAGE in {*needs} - {*provided} else ""
    needs = [one for one in needs if one != _IMAGE or not image]
    missing = [one for one in needs if one not in provided]
    if missing:
        raise InvalidEnvironment(
            f"task {name} asks for {', '.join(missing)}: no container is built and nothing of it is done here. If the "
            f"machine offers what it needs, say so in the config: provided: [{', '.join(missing)}]"
        )
    return HarborTask(
        name=name,
        folder=folder,
        instruction=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        workdir=recipe.workdir,
        copies=tuple(recipe.copies),
        variables=recipe.variables,
        verifier_variables=_texts(name, said, "verifier"),
        solution_variables=_texts(name, said, "solution"),
        budgets=Budgets(
            _seconds(name, said, "environment", "build_timeout_sec"),
            _seconds(name, said, "agent", "timeout_sec"),
            _seconds(name, said, "verifier", "timeout_sec"),
        ),
        image=image,
        digest=_digest(folder),
    )


def _recipe(name: str, environment: Path) -> dockerfile.Recipe:
    for other in _NO_FILES:
        if (environment / other).exists():
            raise InvalidEnvironment(f"task {name} has environment/{other}, which is not followed here")
    file = environment / "Dockerfile"
    if not file.is_file():
        copies = [dockerfile.CopiedFile(environment, DEFAULT_WORKDIR)] if environment.is_dir() else []
        return dockerfile.Recipe(DEFAULT_WORKDIR, copies=copies)
    recipe = dockerfile.read(file)
    if not is_usable(recipe.workdir):
        raise InvalidEnvironment(f"task {name} works in {recipe.workdir or '/'}; WORKDIR must be a folder of its own")
    places = Places(Path("/"), recipe.workdir)
    for copy in recipe.copies:
        try:
            places.real(copy.target)
        except KeyError:
            raise InvalidEnvironment(f"task {name} copies files to {copy.target}, outside of its WORKDIR") from None
    return recipe


def _asked(said: Mapping[str, Any]) -> Iterator[str]:
    """The keys with a wish that is not granted here; one that is off or empty wishes nothing."""
    for table, held in said.items():
        if table in _DESCRIPTIVE:
            continue
        named = {f"{table}.{key}": value for key, value in held.items()} if isinstance(held, dict) else {table: held}
        yield from (key for key, value in named.items() if value and key not in _FOLLOWED)


def _seconds(name: str, said: Mapping[str, Any], table: str, key: str) -> float:
    given = said.get(table, {}).get(key, DEFAULT_TIMEOUT_S)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise InvalidEnvironment(f"task {name}: {table}.{key} is {given!r}, not a number of seconds")
    return float(given)


def _texts(name: str, said: Mapping[str, Any], table: str) -> dict[str, str]:
    found = said.get(table, {}).get("env", {})
    for key, value in found.items():
        if not isinstance(value, str) or "${" in value:
            raise InvalidEnvironment(f"task {name}: {table}.env.{key} is {value!r}; not a text without variables")
    return dict(found)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o777}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
