"""What lies in Redis has a number, and a change of it cannot be forgotten: its digest is kept here beside the number.

The rule: a text that was released or is in use never changes under its number. A change of the Lua library, which also
holds the names of the keys and the schema of the queue's records, raises ``LIBRARY_VERSION`` once after each release;
until the next one its digest below is replaced.
"""

from __future__ import annotations

from services.state.functions import LIBRARY_VERSION, library

# Commit 84ec78a was never released, and is used.
IN_USE = {1: "b7507e68f8da4570"}
NEXT = (2, "3bec9e8949b42b05")


def test_the_library_has_the_number_of_its_text() -> None:
    assert (LIBRARY_VERSION, library()[1]) == NEXT, (
        "raise LIBRARY_VERSION if the text was released, and keep its digest"
    )
    assert max(IN_USE) + 1 == LIBRARY_VERSION
