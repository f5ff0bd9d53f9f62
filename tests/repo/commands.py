"""Whether a command could be typed: its program, module, flags, targets, services and objects exist.

Rule: ours are judged by their own parsers. Other people's programs that are not everywhere (docker, kubectl) are judged
by what they name of ours, and their flags by the lists below, taken from their manuals.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import yaml

from gspo_core.cli import _parser
from tests.repo.pages import blocks

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

# Flags of `docker compose` by subcommand; those that take a value end with =.
COMPOSE_FLAGS = {
    "": {"--env-file=", "--profile="},
    "build": set(),
    "up": {"-d", "--detach", "--wait", "--scale="},
    "down": {"-v"},
    "exec": {"-T"},
    "run": {"--rm", "--no-deps", "-T", "--entrypoint="},
    "restart": set(),
    "cp": set(),
    "ps": set(),
}
KUBECTL_FLAGS = {
    *("-n=", "-f=", "-k=", "-l=", "-i", "-o=", "--dry-run=", "--from-file="),
    *("--all", "--container=", "--for=", "--from=", "--replicas=", "--selector=", "--timeout="),
}
TORCHRUN_FLAGS = {"--nproc-per-node=", "--no-python", "--max-restarts=", "--shutdown-timeout=", "-m"}


class CannotBeTyped(Exception):
    pass


class _Understood(Exception):
    pass


def judge(words: list[str], *, whole: bool) -> None:
    """``whole``: as it is typed; in prose a command may leave out what it must have, and name things in CAPITALS."""
    variables = []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        variables.append(words[0].partition("=")[0])
        words = words[1:]
    if not words or words[0] in ("for", "done"):
        return
    program = words[0].removeprefix(".venv/bin/")
    program = "python" if program == "python3" else program
    if program not in JUDGES:
        raise CannotBeTyped(f"{program} is a program that nothing here knows")
    JUDGES[program](words[1:], whole)
    if unknown := [variable for variable in variables if variable not in settable()]:
        raise CannotBeTyped(f"nothing reads {', '.join(unknown)}")


@cache
def settable() -> set[str]:
    """Variables that are read somewhere."""
    files = [
        "docker-compose.yml",
        "Makefile",
        "services/Dockerfile",
        "services/process/settings.py",
        "gspo_core/cli/connection.py",
        "services/launch/gpus.py",
        "services/launch/engine_command.py",
    ]
    named = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", "".join((ROOT / one).read_text() for one in files)))
    return named | {"COMPOSE_FILE"}  # compose itself


def _parse(parser: argparse.ArgumentParser, words: list[str], whole: bool) -> None:
    def refuse(_: argparse.ArgumentParser, message: str) -> NoReturn:
        if whole or not re.search("are required|expected one argument", message):
            raise CannotBeTyped(message)
        raise _Understood

    if not whole:  # a number where one is wanted, a name everywhere else
        words = [re.sub(r"^[A-Z]+$", "1", word) for word in words]
    with mock.patch.object(argparse.ArgumentParser, "error", refuse), contextlib.suppress(_Understood):
        parser.parse_args(words)


def _gspo(words: list[str], whole: bool) -> None:
    _parse(_parser(), words, whole)


def _python(words: list[str], whole: bool) -> None:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    if words[0] != "-m":
        if not (ROOT / words[0]).is_file():
            raise CannotBeTyped(f"there is no file {words[0]}")
        source = (ROOT / words[0]).read_text()
        if missing := [one for one in words[1:] if one.startswith("--") and f'"{one}"' not in source]:
            raise CannotBeTyped(f"{words[0]} knows no {missing}")
        return
    module = words[1]
    if module.endswith("NAME"):
        return
    _parse(parser_of(module), words[2:], whole)


@cache
def parser_of(module: str) -> argparse.ArgumentParser:
    """That with which ``python -m module`` reads its arguments: made of the calls in its source, since importing all of
    them would load torch and take a minute."""
    path = ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise CannotBeTyped(f"there is no module {module}")
    parser = argparse.ArgumentParser(module, allow_abbrev=False)
    if "argparse" not in path.read_text():
        parser.add_argument("anything", nargs="*")
    calls = [call for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.Call)]
    methods = [(call.func.attr, call) for call in calls if isinstance(call.func, ast.Attribute)]
    for method, call in methods:
        if method == "add_argument":
            _add_argument(parser, call)
    # Their options are taken for everybody's.
    if commands := [ast.literal_eval(call.args[0]) for method, call in methods if method == "add_parser"]:
        parser.add_argument("command", choices=commands)
    return parser


def _add_argument(parser: argparse.ArgumentParser, call: ast.Call) -> None:
    """What is computed is left out: an action or a number of values that is no literal, a type that is no number."""
    given = {one.arg: one.value for one in call.keywords if one.arg}
    options: dict[str, Any] = {
        key: value.value
        for key, value in given.items()
        if key in ("action", "nargs", "required") and isinstance(value, ast.Constant)
    }
    if isinstance(action := given.get("action"), ast.Attribute) and action.attr == "BooleanOptionalAction":
        options["action"] = argparse.BooleanOptionalAction
    if isinstance(kind := given.get("type"), ast.Name) and kind.id in ("int", "float"):
        options["type"] = {"int": int, "float": float}[kind.id]
    names = [one.value for one in call.args if isinstance(one, ast.Constant)]
    parser.add_argument(*names, **options)


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _make(words: list[str], whole: bool) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = [word for word in words if "=" not in word]
    variables = [word.partition("=")[0] for word in words if "=" in word]
    if wrong := set(named) - targets():
        raise CannotBeTyped(f"the Makefile has no target {wrong}")
    if wrong := [variable for variable in variables if f"$({variable})" not in makefile]:
        raise CannotBeTyped(f"the Makefile reads no {wrong}")
    for word in words:
        variable, equals, flags = word.partition("=")
        for module in re.findall(rf"python -m ([\w.]+) .*\$\({variable}\)", makefile) if equals else ():
            _parse(parser_of(module), shlex.split(flags), whole)
    _dry_make(tuple(named))


@cache
def _dry_make(named: tuple[str, ...]) -> None:
    done = subprocess.run(["make", "-n", *named], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeTyped(f"make -n {' '.join(named)}: {done.stderr}")


def _split(words: list[str], flags: set[str], program: str) -> tuple[dict[str, str], list[str]]:
    """Flags before the first word that is none, and the rest."""
    given: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        flag, equals, value = words[0].partition("=")
        words = words[1:]
        if f"{flag}=" in flags:
            if not equals:
                value, words = words[0], words[1:]
        elif flag not in flags:
            raise CannotBeTyped(f"{program}: {flag} is not on the list of flags")
        given[flag] = value
    return given, words


def _docker(words: list[str], whole: bool) -> None:
    if words[:2] == ["volume", "rm"]:
        if wrong := set(words[2:]) - {f"{COMPOSE['name']}_{volume}" for volume in COMPOSE["volumes"]}:
            raise CannotBeTyped(f"compose makes no volumes {wrong}")
        return
    if words[0] in ("images", "tag", "push"):
        _, named = _split(words[1:], {"--format="}, f"docker {words[0]}")
        bare = [word.rpartition("/")[2].partition(":")[0] for word in named]
        if wrong := [one for one in bare if one != "$image" and not fnmatch.filter(images(), one)]:  # of a loop
            raise CannotBeTyped(f"compose builds no images {wrong}")
        return
    if words[0] != "compose":
        raise CannotBeTyped(f"docker {words[0]} is not known here")
    _compose(words[1:], whole)


def _compose(words: list[str], whole: bool) -> None:
    given, words = _split(words, COMPOSE_FLAGS[""], "docker compose")
    if "--env-file" in given and not (ROOT / given["--env-file"]).is_file():
        raise CannotBeTyped(f"there is no {given['--env-file']}")
    profiles = {one for service in COMPOSE["services"].values() for one in service.get("profiles", ())}
    if given.get("--profile", next(iter(profiles))) not in profiles:
        raise CannotBeTyped(f"compose has no profile {given['--profile']}")
    command, rest = words[0], words[1:]
    if command not in COMPOSE_FLAGS:
        raise CannotBeTyped(f"docker compose {command} is not known here")
    given, rest = _split(rest, COMPOSE_FLAGS[command], f"docker compose {command}")
    for service in rest if command not in ("exec", "run", "cp") else [one.partition(":")[0] for one in rest[:1]]:
        if service not in COMPOSE["services"] and not (service.isupper() and not whole):
            raise CannotBeTyped(f"compose has no service {service}")
    inside = rest[1:]
    if command == "run" and (inside or "--entrypoint" in given):
        judge([given["--entrypoint"], *inside], whole=whole)
    elif command == "exec" and inside[0] != "cat":
        judge(inside, whole=whole)


@cache
def images() -> set[str]:
    """What compose builds, without tags."""
    return {one["image"].partition(":")[0] for one in COMPOSE["services"].values() if "build" in one}


@cache
def objects() -> set[tuple[str, str]]:
    """Kind and name of everything in the manifests."""
    found = set()
    for path in (ROOT / "k8s").rglob("*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            if isinstance(one, dict) and "metadata" in one:
                found.add((one["kind"].lower(), one["metadata"].get("name", "")))
    return found


@cache
def copied() -> set[str]:
    """Folders that a page has its reader make of one that is here."""
    found = {match for one in blocks() for match in _COPY.findall(one.text)}
    return {made for given, made in found if (ROOT / given).is_dir()}


_COPY = re.compile(r"^cp -r (\S+) (\S+)$", re.MULTILINE)
KINDS = {
    **{"cj": "cronjob", "cm": "configmap", "deploy": "deployment", "hpa": "horizontalpodautoscaler", "ns": "namespace"},
    **{"netpol": "networkpolicy", "pdb": "poddisruptionbudget", "po": "pod", "pvc": "persistentvolumeclaim"},
    **{"sa": "serviceaccount", "sts": "statefulset", "svc": "service"},
}
# What a cluster has that no manifest holds as it is.
OF_CLUSTERS = {"configmap", "event", "job", "node", "persistentvolume", "pod", "secret"}


@cache
def kinds() -> set[str]:
    """As `kubectl get` takes them: one, several, or short."""
    found = {kind for kind, _ in objects()} | OF_CLUSTERS
    several = {re.sub("y$", "ie", kind) + ("es" if kind.endswith("s") else "s") for kind in found}
    return found | several | {short for short, kind in KINDS.items() if kind in found}


def _kubectl(words: list[str], whole: bool) -> None:
    end = words.index("--") if "--" in words else len(words)
    named, inside = words[:end], words[end + 1 :]
    given: dict[str, str] = {}
    rest = []
    while named:
        if named[0].startswith("-"):
            more, named = _split(named, KUBECTL_FLAGS, "kubectl")
            given |= more
        else:
            rest.append(named.pop(0))
    if rest[:1] == ["get"] and (wrong := set(",".join(rest[1:]).split(",")) - kinds()):
        raise CannotBeTyped(f"nothing of the kinds {wrong} is in the manifests")
    if "-n" in given and ("namespace", given["-n"]) not in objects():
        raise CannotBeTyped(f"the manifests make no namespace {given['-n']}")
    if "--from" in given and tuple(given["--from"].split("/")) not in objects():
        raise CannotBeTyped(f"the manifests have no {given['--from']}")
    for flag in ("-f", "-k"):
        if (path := given.get(flag, "-")) != "-" and path not in copied() and not (ROOT / path).exists():
            raise CannotBeTyped(f"there is no {path}")
    if inside and "..." not in inside:
        judge(inside, whole=whole)
    for kind, one in _objects_named(rest):
        if (KINDS.get(kind, kind), one) not in objects():
            raise CannotBeTyped(f"the manifests have no {kind} {one}")


def _objects_named(words: list[str]) -> Iterator[tuple[str, str]]:
    match words:
        case ["apply"] | ["rollout", "restart" | "status"] | ["exec" | "port-forward" | "scale" | "wait" | "delete"]:
            return
        case ["cp", place, _] if found := re.match(r"([a-z]+)-0:/", place):
            yield "statefulset", found[1]
        case ["exec" | "logs", pod] if pod.endswith("-0"):
            yield "statefulset", pod.removesuffix("-0")
        case ["create", "secret", "generic", secret]:
            role = secret.removeprefix("gspo-")
            mounted = "".join(
                path.read_text() for part in ("base", "components") for path in (ROOT / "k8s" / part).rglob("*.yaml")
            )
            if "$" not in role and f"secretName: {secret}" not in mounted:
                raise CannotBeTyped(f"no pod mounts the secret {secret}")
        case ["scale", path] if "/" in path:
            yield path.partition("/")[0], path.partition("/")[2]
        case ["delete", "pvc", *_] | ["delete", "job" | "scaledobject"] | ["wait", "pod"]:
            return  # claims of a StatefulSet have names that the cluster makes
        case ["create", "job", _] | ["wait", _] | ["logs", _] | ["get", _]:
            return  # a job that was made by hand; kinds
        case ["scale", kind, *some]:
            yield from ((kind, one) for one in some)
        case ["delete", kind, one]:
            yield kind, one
        case ["exec", path] | ["port-forward", path, _] | ["rollout", "restart" | "status", path]:
            kind, _, one = path.partition("/")
            yield kind, one
        case _:
            raise CannotBeTyped(f"kubectl {' '.join(words)} is not known here")


def _pip(words: list[str], whole: bool) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\[([a-z,-]+)\]", " ".join(words)):
        if wrong := set(named.split(",")) - extras.keys():
            raise CannotBeTyped(f"the package has no extras {wrong}")
    for word in words:
        if word.startswith("gspo"):
            raise CannotBeTyped("nothing of that name is published: install the checkout, pip install -e .")


def _torchrun(words: list[str], whole: bool) -> None:
    given, words = _split(words, TORCHRUN_FLAGS, "torchrun")
    if "-m" in given:
        _parse(parser_of(words[0]), words[1:], whole)


def _pytest(words: list[str], whole: bool) -> None:
    """Its flags are taken for known; folders and files must be there."""
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    if missing := [path for path in paths if not (ROOT / path).exists()]:
        raise CannotBeTyped(f"there are no tests {missing}")


def _cp(words: list[str], whole: bool) -> None:
    *sources, _ = [word for word in words if not word.startswith("-")]
    if missing := [one for one in sources if one not in copied() and not (ROOT / one).exists()]:
        raise CannotBeTyped(f"there is nothing to copy at {missing}")


def _anything(words: list[str], whole: bool) -> None:
    """Not ours and nothing of ours in it, or executed by the test that the table names."""


JUDGES: dict[str, Callable[[list[str], bool], None]] = {
    "bash": _anything,
    "curl": _anything,
    "docker": _docker,
    "gspo": _gspo,
    "hf": _anything,
    "kubectl": _kubectl,
    "cp": _cp,
    "make": _make,
    "pip": _pip,
    "lint-imports": _anything,
    "mypy": _anything,
    "pytest": _pytest,
    "python": _python,
    # Of the reader; a test compares what it starts with what `gspo up` starts.
    "PYTHON": _anything,
    "ruff": _anything,
    "sbatch": _anything,
    "source": _anything,
    "tensorboard": _anything,
    "torchrun": _torchrun,
    "wandb": _anything,
    "git": _anything,
    "cd": _anything,
}
