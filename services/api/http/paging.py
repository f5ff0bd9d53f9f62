"""Pages of lists that are whole in memory: from behind an item on, one more than asked for.

Rule: a cursor that is no item of the list is refused, never taken for its beginning or its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from services.api.http.errors import RequestRefused
from services.api.views.store_views import id_of

Item = TypeVar("Item")


def after_id(items: Sequence[Item], after: str | None, limit: int) -> Sequence[Item]:
    """From behind the item ``after`` on, one more than ``limit``. Raises RequestRefused 400."""
    if after is None:
        return items[: limit + 1]
    ids = [id_of(one) for one in items]
    if after not in ids:
        raise RequestRefused(400, "invalid_cursor", f"{after[:80]!r} is no item of this list", param="after")
    start = ids.index(after) + 1
    return items[start : start + limit + 1]
