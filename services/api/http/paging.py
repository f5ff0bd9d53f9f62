"""Pages of lists that are whole in memory: the items behind a cursor, and one more than asked for.

Rule: a cursor that names no item of the list is refused, never taken for its beginning or its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.api.http.errors import RequestRefused
from services.api.views.store_views import Listed


def after_id(items: Sequence[Listed], after: str | None, limit: int) -> Sequence[Listed]:
    """Up to ``limit`` + 1 items behind ``after``. Raises RequestRefused 400."""
    if after is None:
        return items[: limit + 1]
    ids = [one.id for one in items]
    if after not in ids:
        raise RequestRefused(400, "invalid_cursor", f"{after[:80]!r} is not in this list", param="after")
    start = ids.index(after) + 1
    return items[start : start + limit + 1]
