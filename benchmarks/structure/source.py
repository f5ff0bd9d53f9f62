"""The Python modules of a tree, and which module imports which.

Only files are read: a tree is a checkout or an unpacked ``git archive``. Product code is what lies below ``PRODUCT``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("gspo_core", "environments", "services")


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    """Relative to the tree."""
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


def read_modules(root: Path, folders: tuple[str, ...] = PRODUCT) -> dict[str, Module]:
    modules = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(name, relative, text, ast.parse(text, filename=str(relative)))
    return modules


def imports_of(module: Module, known: dict[str, Module], *, at_start: bool = False, for_types: bool = True) -> set[str]:
    """The known modules that ``module`` names in an import statement, whether inside a function or for type checking.

    ``at_start`` leaves out functions, ``for_types=False`` what stands below ``if TYPE_CHECKING:``.
    """
    found = set()
    for statement in _import_statements(module.tree, inside_functions=not at_start, for_types=for_types):
        for target in _targets(statement, module.package):
            name = target
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module.name:
                found.add(name)
    return found


def _import_statements(
    node: ast.AST, *, inside_functions: bool, for_types: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not for_types and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            otherwise = ast.Module(child.orelse, [])
            yield from _import_statements(otherwise, inside_functions=inside_functions, for_types=for_types)
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _import_statements(child, inside_functions=inside_functions, for_types=for_types)


def _targets(statement: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """Dotted names, as long as they could be: ``from a import b`` gives ``a.b``."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        parts = package.split(".")
        above = parts[: len(parts) - statement.level + 1]
        base = ".".join([*above, base] if base else above)
    return [f"{base}.{alias.name}" for alias in statement.names]


def imported_at_start(start: str, modules: dict[str, Module]) -> set[str]:
    """Every module of ours that ``python -m start`` loads before it does anything, packages included.

    A test compares it with ``sys.modules``. What a module names for type checking is not loaded, unless it loads that
    when one of its names is first used, as ``gspo_core.spec`` does: whoever imports such a name has it loaded.
    """
    loaded: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in loaded:
            continue
        loaded.add(name)
        module = modules[name]
        waiting += imports_of(module, modules, at_start=True, for_types=_loads_on_first_use(module))
        parent = name.rpartition(".")[0]
        if parent in modules:
            waiting.append(parent)
    return loaded


def _loads_on_first_use(module: Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in module.tree.body)
