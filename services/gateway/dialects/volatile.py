"""Texts that a harness puts into its instructions and that differ from one request to the next: a nonce, a checksum.

Rule: what is listed here is dropped before anything is compared or rendered, or each turn of such an agent would be a
new branch that reads everything again. Nothing is dropped in silence: the answer names it, and it is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TEXTS: Mapping[str, re.Pattern[str]] = {
    # Claude Code: "x-anthropic-billing-header: cc_version=...; cc_entrypoint=...; cch=NONCE;", a block of its own.
    "claude_code_billing": re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE),
}


def without_volatile(text: str) -> tuple[str, list[str]]:
    """``text`` as it means the same in every request, and the names of what is left out."""
    names = list[str]()
    for name, pattern in _TEXTS.items():
        text, count = pattern.subn("", text)
        if count:
            names.append(name)
    return text, names
