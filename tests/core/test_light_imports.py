"""The light half stays light: what a plugin author or a laptop client imports pulls in neither torch nor numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a process of a plugin author, or a command on a laptop, must not pay for.
HEAVY = (
    *("torch", "numpy", "transformers", "tokenizers", "jinja2", "safetensors"),
    *("redis", "fastapi", "starlette", "uvicorn", "structlog", "pydantic_settings"),
    *("httpx", "rich", "yaml", "asyncio"),
)


def heavy_modules_of(statement: str) -> list[str]:
    """Those of HEAVY that a fresh process holds after the statement."""
    code = f"import sys\n{statement}\nprint(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return shown.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import gspo_core.types",
        "import gspo_core.spec",
        "import gspo_core.client",
        "import gspo_core.env, gspo_core.spec, gspo_core.types",
        "from gspo_core.spec import JobSpec; JobSpec(model='m', environments=[{'ref': 'a:B'}])",
        "import gspo_core.cli; gspo_core.cli._parser()",
    ],
)
def test_light_modules_import_nothing_heavy(statement: str):
    allowed = {"asyncio"} if "env" in statement.replace("environments", "") else set()
    assert set(heavy_modules_of(statement)) <= allowed


@pytest.mark.parametrize("module", ["chat", "codec", "assemble", "advantage", "staleness", "spec_file", "cli"])
def test_the_rest_of_the_light_half_needs_no_torch(module: str):
    found = heavy_modules_of(f"import gspo_core.{module}")
    assert not {"torch", "transformers", "redis", "fastapi"} & set(found)


def test_the_names_of_a_specification_cost_nothing_until_one_is_used():
    code = (
        "import sys, gspo_core.spec\nbefore = 'pydantic' in sys.modules\n"
        "from gspo_core import job_spec\nprint(before, gspo_core.spec.JobSpec is job_spec.JobSpec)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "True"]


def test_every_name_of_a_specification_is_there():
    import gspo_core.spec

    assert all(getattr(gspo_core.spec, name).__name__ == name for name in gspo_core.spec.__all__)
    with pytest.raises(AttributeError, match="Jobspec"):
        _ = gspo_core.spec.Jobspec


@pytest.mark.parametrize("module", ["env", "chat", "testing", "cli.env"])
def test_authors_do_not_wait_for_templates_tokenizers_and_models(module: str):
    loaded = set(heavy_modules_of(f"import gspo_core.{module}"))
    assert not loaded & {"jinja2", "tokenizers", "numpy", "torch", "httpx"}


def test_a_client_loads_its_http_library_when_it_is_made():
    assert "httpx" in heavy_modules_of("from gspo_core.client import Client; Client().close()")


def test_the_search_finds_what_is_heavy():
    assert heavy_modules_of("import numpy") == ["numpy"]
