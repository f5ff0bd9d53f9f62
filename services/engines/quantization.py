"""Engines whose weights are quantised: recognised by what they say and by the folder of their model, and refused.

Rule: versions are published in full precision, and nothing here converts them; an engine that did it by itself would
sample from another policy than is trained. Nothing is asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What servers say where nothing is quantised, beside nothing at all.
_NONE = ("", "none", "null", "unquant", "unquantized")


def named(said: object) -> str:
    """The method that an engine names; empty where it names none."""
    return said if isinstance(said, str) and said.lower() not in _NONE else ""


def of_config(config: Mapping[str, Any]) -> str:
    """The method in a model's ``config.json``, or in the part of it that describes the text."""
    nested = config.get("text_config")
    found = config.get("quantization_config") or (isinstance(nested, Mapping) and nested.get("quantization_config"))
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return method if isinstance(method, str) and method else "of an unnamed kind"


def problem(method: str, *, is_of_model: bool = False) -> str:
    """Why such an engine cannot serve a job, and what to do."""
    if is_of_model:
        return (
            f"the weights of its model are quantised ({method}), and versions are published in full precision: start "
            "it from the model that the job trains"
        )
    return (
        f"it quantises its weights ({method}), and would sample from another policy than is trained: start it without "
        "quantization, from the model that the job trains"
    )
