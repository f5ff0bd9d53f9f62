"""``python -m services.launch.follower FILE``: submits a job under its key and follows it to its end.

Rule: its exit status tells a job that is over, or refused, from an API that was away meanwhile. It tries no longer than
``gspo submit --watch``: who started it starts it again, and under its key the job is the same one.
"""

from __future__ import annotations

import argparse
import os
import sys

from gspo_core.cli.command import CommandError
from gspo_core.cli.jobs import submit
from gspo_core.cli.terminal import plain
from gspo_core.client import ApiError, Unreachable

API_AWAY = os.EX_TEMPFAIL
_LATER = frozenset({408, 425, 429, 502, 503, 504})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.launch.follower", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--key", required=True)
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    try:
        return submit(arguments.url, arguments.file, dry_run=False, watch=True, key=arguments.key)
    except CommandError as error:
        print(f"gspo: {plain(str(error))}", file=sys.stderr)
        return API_AWAY if _may_pass(error.__cause__) else 1
    except KeyboardInterrupt:
        return 130


def _may_pass(cause: BaseException | None) -> bool:
    if isinstance(cause, ApiError):
        return cause.status in _LATER or cause.code == "in_progress"
    return isinstance(cause, Unreachable)


if __name__ == "__main__":
    sys.exit(main())
