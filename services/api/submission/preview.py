"""What this process can see of the model and the environments that a job names, for a plan that is only looked at.

Rule: no code of an environment is run here and nothing is refused, because trainers and rollout workers may have files
that this process does not. What is missing here is a warning; what only they can tell is listed as unchecked.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gspo_core.judge_spec import JudgeSpec
from gspo_core.model_files import context_of, problem_of
from gspo_core.spec import JobSpec
from services.api.http.errors import RequestRefused
from services.api.views.store_views import MemoryPlanView
from services.files.data_dir import HubName


@dataclass
class Visible:
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def look(spec: JobSpec) -> Visible:
    """Reads files: call it in a thread."""
    found = Visible()
    _look_at_model(Path(spec.model), found)
    _look_at_context(spec, found)
    if HubName.parse(spec.model) is not None and not Path(spec.model).is_dir():
        found.warnings.append(
            f"model: if {spec.model} is of the Hugging Face hub, `gspo fetch {spec.model}` fetches it"
        )
    for place, entry in enumerate(spec.environments):
        param = f"environments[{place}].ref"
        if entry.agent is not None:
            found.unchecked.append(f"{param}: whether a gateway can load and start the agent of {entry.ref}")
            if entry.agent.judge is not None:
                found.unchecked.append(_of_judge(f"environments[{place}].agent.judge", entry.agent.judge))
            if ":" in entry.ref:
                _look_at_class(param, entry.ref, found)
            continue
        if ":" not in entry.ref:
            # Registered: it exists, and rollout workers have examined it.
            found.unchecked.append(f"{param}: whether the prompts of {entry.ref} fit the model's context")
            continue
        _look_at_class(param, entry.ref, found)
        what = f"whether rollout workers can load {entry.ref}, and its prompts fit the model's context"
        found.unchecked.append(f"{param}: {what}; `gspo env validate --model` tries it")
    return found


def plan_memory(spec: JobSpec, gpus: str) -> MemoryPlanView:
    """Whether the learner fits `gpus`. Reads the model's configuration."""
    from gspo_core.plan import UnknownShape, parse_machines, plan_job, plan_view  # few submissions are dry runs

    try:
        return MemoryPlanView.model_validate(plan_view(plan_job(spec, parse_machines(gpus))))
    except UnknownShape as error:
        raise RequestRefused(422, "validation_failed", f"no plan: {error}", param="model") from error
    except ValueError as error:
        raise RequestRefused(422, "validation_failed", str(error), param="gpus") from error


def _of_judge(param: str, judge: JudgeSpec) -> str:
    key = "" if judge.key is None else f", whether gateways have the key {judge.key} for it (GSPO_JUDGE_KEYS)"
    tasks = ", whether tasks have the fields of its prompt" if judge.asks_for_task else ""
    return (
        f"{param}: whether {judge.model} answers at {judge.url}{key}{tasks}; nobody asks it before an agent has ended"
    )


def _look_at_model(model: Path, found: Visible) -> None:
    if (problem := problem_of(model)) is not None:
        found.warnings.append(f"model: {problem} where the API runs")
    found.unchecked.append(f"model: whether trainers and rollout workers see {model}, and whether its weights load")


def _look_at_context(spec: JobSpec, found: Visible) -> None:
    """Warns of limits beyond the model's context, which are never reached."""
    context = context_of(Path(spec.model))
    if context is None:
        return
    asked = spec.limits.max_context_tokens
    if asked is not None and asked > context:
        found.warnings.append(
            f"limits.max_context_tokens: {asked:,} tokens, but the model's context is {context:,}: episodes end there"
        )
    if spec.sampling.max_new_tokens > context:
        found.warnings.append(
            f"sampling.max_new_tokens: {spec.sampling.max_new_tokens:,} tokens for a turn, but the model's context is "
            f"{context:,}"
        )


def _look_at_class(param: str, ref: str, found: Visible) -> None:
    if (problem := problem_of_class(ref)) is not None:
        found.warnings.append(f"{param}: {problem}")


def problem_of_class(ref: str) -> str | None:
    """What speaks against it where this process runs. Nothing is imported."""
    module, _, attribute = ref.rpartition(":")
    path = Path(module) if module.endswith(".py") else _find(module)
    if path is None or not path.is_file():
        what = f"file {module}" if module.endswith(".py") else f"module {module}"
        return f"there is no {what} where the API runs"
    names = _names(path)
    if names is not None and attribute.partition(".")[0] not in names:
        return f"{path.name} defines no {attribute}"
    return None


def _find(module: str) -> Path | None:
    """Where a module is on the import path. Nothing is imported, not even the packages above it."""
    parts = module.split(".")
    for folder in map(Path, sys.path):
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path
    return None


def _names(path: Path) -> set[str] | None:
    """What a file binds at its top; None where that cannot be told from its text."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return (
        None if any(_binds_more(node) for node in tree.body) else {name for node in tree.body for name in _bound(node)}
    )


def _binds_more(node: ast.stmt) -> bool:
    """A star import, or a statement with statements inside."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    known = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.Assign, ast.AnnAssign, ast.Expr)
    return not isinstance(node, known)


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)
        case ast.Assign(targets=targets):
            yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
