"""``JSON``: any value that JSON can say.

Rule: it stands only where the user defines the content, such as an environment's config or a task. Where the fields are
known, a type names them.
"""

from __future__ import annotations

from typing import TypeAlias

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
