"""In which words a policy is answered, and which members of a class are its tools.

Rule: everything here is training input, so every dialect is exact: the same event always reads the same.
This is our own; others (`trl`) override what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import FunctionType

from gspo_core.env.tools import Bound, Tool, error_text, result_content
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Content, Message, ToolCall


class EnvironmentDialect:
    """Ours. Stateless."""

    uses_docstring = True
    """The class docstring is the system prompt."""

    def is_tool(self, member: object) -> bool:
        """Whether a public member, as it stands in the class, is a tool."""
        return inspect.isfunction(member) or isinstance(member, classmethod)

    def tool(self, name: str, function: FunctionType) -> Tool:
        """A public method as the policy is told of it."""
        return Tool.of(name, function)

    def bind(self, tool: Tool, arguments: JSON) -> Bound:
        """The keywords of a call. Raises ``ArgumentError``."""
        return tool.bind(arguments)

    def result(self, value: object) -> Content:
        return result_content(value)

    def failure(self, error: BaseException) -> str:
        """An exception that a member raised."""
        return error_text(error)

    def problem(self, text: str) -> str:
        """A call that could not be made, or took too long."""
        return f"error: {text}"

    def unknown_tool(self, name: str | None, tools: Collection[str]) -> str:
        return self.problem(f"unknown tool {name!r}; available: {sorted(tools)}")

    def unreadable(self, status: CallStatus) -> str:
        return self.problem(str(status))

    def message(self, call: ToolCall, number: int, content: Content) -> Message:
        """The answer to call ``number`` of the episode."""
        return {"role": "tool", "content": content, "name": call.name or "", "tool_call_id": f"call_{number}"}
