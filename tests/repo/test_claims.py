"""What the pages name of the code is there: keys of a job with their defaults and values, metrics, variables, files,
modules, and the links between pages."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from gspo_core.environment_spec import EpisodeLimits, Limits
from gspo_core.job_spec import JobSpec
from gspo_core.objective_config import ObjectiveConfig
from services.process.settings import PREFIX, Settings
from tests.repo.pages import ROOT, name, pages, prose, spans
from tests.repo.test_operations import metrics

PAGES = [page for page in pages() if page.name != "CHANGELOG.md"]
SOURCES = ("gspo_core", "environments", "services", "examples", "tests", "benchmarks", "docs", "deploy", "k8s")


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif not isinstance(annotation, types.GenericAlias) or typing.get_args(annotation):
        for inner in typing.get_args(annotation):
            yield from models(inner)


@cache
def keys() -> dict[str, list[tuple[type[BaseModel], str]]]:
    """Every key of a job, by its own name and by its path: `rollout.max_staleness`, `max_staleness`."""
    found: dict[str, list[tuple[type[BaseModel], str]]] = {}

    def walk(model: type[BaseModel], path: str) -> None:
        for key, field in model.model_fields.items():
            for spelling in {key, f"{path}{key}", field.alias or key}:
                found.setdefault(spelling, []).append((model, key))
            for inner in models(field.annotation):
                walk(inner, f"{path}{key}.")

    walk(JobSpec, "")
    return found


def sections() -> set[str]:
    return {key for key, field in JobSpec.model_fields.items() if any(models(field.annotation))}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_of_a_job_exist(page: Path) -> None:
    named = {span.partition(":")[0].replace("[i]", "") for span in spans(page)}
    dotted = {one for one in named if re.fullmatch(r"[a-z_]+\.[a-z_.]+", one) and one.split(".")[0] in sections()}
    modules = {one for one in dotted if re.search(r"\.(py|md|json)$", one) or is_there(one)}
    assert sorted(dotted - modules - keys().keys()) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_values_of_keys_are_allowed(page: Path) -> None:
    refused = []
    for span in spans(page):
        key, colon, value = span.partition(": ")
        if colon and key in keys() and not re.search(r"\b(k|n|N)$|\.\.\.", value):
            try:
                read = yaml.safe_load(value)
            except yaml.YAMLError:
                continue
            if not any(accepts(model, field, read) for model, field in keys()[key]):
                refused.append(span)
    assert refused == []


def accepts(model: type[BaseModel], key: str, value: Any) -> bool:
    field = model.model_fields[key]
    try:
        TypeAdapter(typing.Annotated[field.annotation, field]).validate_python(value)
    except ValidationError:
        return any(models(field.annotation))  # a section that is not written out
    return True


def default(model: type[BaseModel], key: str) -> Any:
    if model is Limits:
        return getattr(EpisodeLimits(), key)
    given = model.model_fields[key].default
    return None if given is PydanticUndefined else given


def defaults_on(page: Path) -> Iterator[tuple[str, float | str]]:
    """`key` (5); rows whose second cell is the value, | `key` | 5 |; and `key` ... `value` (default)."""
    text = prose(page)
    for key, number in re.findall(r"`([a-z0-9_.]+)` \((\d[\d.,e-]*)\)", text):
        yield key, float(number.replace(",", ""))
    for key, number in re.findall(r"^\| `([a-z0-9_.]+)`(?:, `[^|]+)? \| (\d[\d.e-]*)(?:,| \|)", text, re.MULTILINE):
        yield key, float(number)
    for key, word in re.findall(r"^\| `([a-z0-9_.]+)` \| `([a-z_]+)` \|", text, re.MULTILINE):
        yield key, word
    for key, word in re.findall(r"`([a-z0-9_.]+)`[^`]{0,80}`([a-z_]+)` \(default\)", text):
        yield key, word


def test_defaults_on_the_pages_are_those_of_the_code() -> None:
    shown = [(name(page), key, number) for page in PAGES for key, number in defaults_on(page) if key in keys()]
    wrong = [one for one in shown if one[2] not in {default(*where) for where in keys()[one[1]]}]
    assert wrong == []
    assert len(shown) >= 20


def test_each_key_of_the_objective_has_a_reason_for_its_default() -> None:
    text = (ROOT / "docs" / "objective.md").read_text()
    section = text[text.index("### Why the defaults are what they are") :].split("\n## ")[0]
    cells = [row.split(" | ") for row in section.splitlines() if row.startswith("| `")]
    explained = {key for keys, *_ in cells for key in re.findall(r"`([a-z0-9_]+)`", keys)}
    assert set(ObjectiveConfig.model_fields) - explained == set()
    assert all(len(cell) == 3 and len(cell[2].split()) >= 5 for cell in cells)


@cache
def sources() -> str:
    files = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".lua", ".yml")
    ]
    files += [ROOT / "docker-compose.yml", ROOT / "Makefile", ROOT / "services" / "Dockerfile"]
    return "\n".join(path.read_text() for path in files)


@cache
def written_metrics() -> re.Pattern[str]:
    """Everything that the processes write as a name with a slash; parts that are filled in match anything."""
    product = "".join(path.read_text() for folder in SOURCES[:3] for path in (ROOT / folder).rglob("*.py"))
    texts = set(re.findall(r'"([a-z_]+/[\w{}./\[\]]+)"', product))
    return re.compile("|".join(re.sub(r"\\\{[^/]*?\\\}", "[a-z0-9_]+", re.escape(one)) for one in sorted(texts)))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_metrics_exist(page: Path) -> None:
    families = {"attempts", "drift", "engine", "episodes", "gspo", "host", "learner", "reward", "sampling", "selection"}
    families |= {"staleness", "throughput", "time", "tokens", "worlds", "groups", "eval"}
    named = {one for one in spans(page) if re.fullmatch(r"[a-z]+/[a-z0-9_/]+", one) and one.split("/")[0] in families}
    assert sorted(one for one in named if not written_metrics().fullmatch(one.removeprefix("eval/"))) == []


def test_what_prometheus_is_given_exists() -> None:
    ours = {"gspo_core", "gspo_service", "gspo_data", "gspo_redis", "gspo_api_keys", "gspo_redis_url", "gspo_env_token"}
    exported = metrics()
    for page in PAGES:
        series = {one for span in spans(page) for one in re.findall(r"\bgspo_[a-z_]+", span)}
        assert series - ours - exported == set(), name(page)


def test_variables_exist() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        named = set(re.findall(r"\bGSPO_[A-Z][A-Z0-9_]*[A-Z0-9]", page.read_text()))
        assert named - variables() == set(), name(page)


@cache
def variables() -> set[str]:
    settings = {PREFIX + field.upper() for field in Settings.model_fields}
    return settings | set(re.findall(r"\bGSPO_[A-Z][A-Z0-9_]*[A-Z0-9]", sources()))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = []
    for span in spans(page):
        for path in re.findall(
            r"(?<![\w./<>*-])((?:[\w.-]+/)*[\w*.-]+\.(?:py|md|sh|lua|ya?ml|json|png))(?![\w.])", span
        ):
            first = path.split("/")[0]
            if "/" in path and first in (*SOURCES, "docs") and not list(ROOT.glob(path)):
                missing.append(path)
            if path.startswith("test_") and not list((ROOT / "tests").rglob(path)):
                missing.append(path)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_that_are_named_exist(page: Path) -> None:
    missing = []
    for span in spans(page):
        for dotted in re.findall(
            r"(?<![\w./-])((?:gspo_core|services|environments|examples|benchmarks|tests)(?:\.\w+)+)(?![\w/])", span
        ):
            if not is_there(dotted) and not dotted.endswith(".NAME"):
                missing.append(dotted)
    assert missing == []


def is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_dir() and length == len(parts):
            return True
        if file.is_file():
            return all(re.search(rf"\b{part}\b", file.read_text()) for part in parts[length:])
    return False


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    text = prose(page)
    targets = re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)", text)
    targets += re.findall(r'(?:src|href)="(?!https?://)([^"]+)"', text)
    astray = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            astray.append(target)
    assert astray == []
