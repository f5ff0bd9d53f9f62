"""Runs a model's chat template with the helpers that model publishers expect.

Rule: a template is untrusted code: it runs in a sandbox, sees only its inputs, and has no clock.
Compiling a template imports `jinja2`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolSchema

if TYPE_CHECKING:
    import jinja2
    from jinja2.nodes import Node
    from jinja2.parser import Parser


class TemplateRefused(ValueError):
    """A chat template is unusable or rejects a conversation."""


class Template:
    def __init__(self, compiled: jinja2.Template) -> None:
        self._compiled = compiled

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        variables: Mapping[str, JSON],
        generation_prompt: bool,
    ) -> str:
        """Raises ``TemplateRefused``."""
        try:
            return str(
                self._compiled.render(
                    **{"messages": messages, "tools": tools or None, "add_generation_prompt": generation_prompt},
                    **variables,
                )
            )
        except TemplateRefused:
            raise
        except Exception as error:  # untrusted code
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}: {error}") from error


def compile_template(source: str) -> Template:
    """Raises ``TemplateRefused``."""
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise TemplateRefused("chat templates need the package jinja2: pip install 'jinja2>=3.1'") from None

    class GenerationTag(Extension):
        """``{% generation %}`` marks assistant text for other programs; ignored here."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return Template(environment.from_string(source))
    except TemplateSyntaxError as error:
        raise TemplateRefused(f"the chat template cannot be read (line {error.lineno}): {error.message}") from error


def _to_json(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(f"the chat template says: {message}")
