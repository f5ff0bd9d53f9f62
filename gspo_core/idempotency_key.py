"""What an ``Idempotency-Key`` may be, for its sender: the API refuses others, and some fit into no request."""

from __future__ import annotations

import re

KEY = re.compile(r"[\x21-\x7e]{1,255}")
IN_WORDS = "a key is 1 to 255 characters of ASCII, without blanks"
