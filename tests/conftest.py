"""What holds for every test: no property is judged by its time, and no parse meets what an earlier test left behind.

Python up to 3.12 cannot parse while it parses. The collector may run in the middle of `ast.parse` and finalise a task
or a connection of an earlier test; whoever reports its exception formats a traceback, and that parses too. The outer
parse then ends with "SystemError: AST constructor recursion depth mismatch", whatever its text was.
"""

from __future__ import annotations

import ast
import functools
import gc
from typing import Any

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

parse_and_collect = ast.parse


@functools.wraps(parse_and_collect)
def parse_undisturbed(*args: Any, **kwargs: Any) -> Any:
    collects = gc.isenabled()
    gc.disable()
    try:
        return parse_and_collect(*args, **kwargs)
    finally:
        if collects:
            gc.enable()


ast.parse = parse_undisturbed
