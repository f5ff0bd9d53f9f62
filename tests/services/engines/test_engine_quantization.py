"""Quantised engines are known by what they say and by their model's folder, and the doctor names them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.engines import acquaintance, quantization
from services.engines.acquaintance import Acquaintance, acquaint
from services.engines.protocol import Connect
from services.engines.sglang import EngineClient
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, ""),
        ({"quantization_config": None}, ""),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"bits": 4}}, "of an unnamed kind"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
)
def test_a_models_configuration_names_the_method(config: dict[str, Any], method: str) -> None:
    assert quantization.of_config(config) == method


@pytest.mark.parametrize("said", [None, "", "none", "unquant", 8])
def test_an_engine_that_names_no_method_is_not_quantised(said: object) -> None:
    assert quantization.named(said) == ""


async def test_the_doctor_says_which_engine_is_quantised_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    engines = {name: ScriptedEngine(tmp_path) for name in ("plain", "fp8")}
    engines["fp8"].layout["quantization"] = "fp8"

    @contextlib.asynccontextmanager
    async def open_scripted(_keys: object) -> AsyncIterator[Connect]:
        async with httpx.AsyncClient(transport=ScriptedTransport(engines)) as http:
            yield lambda url: EngineClient(url, http)

    monkeypatch.setattr(acquaintance, "open_engines", open_scripted)
    plain, fp8 = await acquaint(["http://plain", "http://fp8"], [])
    assert plain.acquaintance is not Acquaintance.REFUSED
    assert fp8.acquaintance is Acquaintance.REFUSED
    assert fp8.text.startswith("http://fp8: it quantises its weights (fp8)")
    assert "start it without quantization" in fp8.text
