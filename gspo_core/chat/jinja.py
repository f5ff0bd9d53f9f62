"""Runs a model's chat template, with what model publishers expect to find there.

Rule: a template is foreign code: it runs in a sandbox, sees only what it is given, and knows no clock.
`jinja2` is imported when a template is compiled.
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
    """A chat template cannot be used, or does not accept a conversation."""


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
        except Exception as error:  # foreign code
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}: {error}") from error


def compile_template(source: str) -> Template:
    """Raises ``TemplateRefused``."""
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise TemplateRefused("chat templates need the package jinja2: pip install 'jinja2>=3.1'") from None

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for other programs; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
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
    """Without HTML escapes, which jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(f"the chat template says: {message}")
