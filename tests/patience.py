"""How long a test waits for what must come before it says that it never will.

Waiting costs nothing while all is well, so it is far beyond what a busy machine needs, and below pytest's own limit:
a test that hangs says itself what it waited for.
"""

from __future__ import annotations

HANG_S = 600.0
