"""What each kind of process may do in Redis, as an ACL file that the server loads (``aclfile``).

The rule: everything is forbidden that is not listed; the default user is off; a rollout worker, which runs other
people's environments, may call its own functions only, load none, and reach no key but ours. Passwords are read from
files and appear as digests. What a function does inside is checked against its caller too, hence the plain commands.

``python -m services.state.roles PASSWORDS_DIR > users.acl``: one file per user, named like it, at least 16 characters.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MIN_PASSWORD_CHARS = 16

CONNECTING = ("ping", "hello", "multi", "exec", "discard")
READING = (
    *("exists", "hexists", "hget", "hgetall", "hkeys", "hlen", "hmget", "hvals", "smembers"),
    *("zcard", "zrange", "zscore", "xinfo|stream", "xlen", "xrange", "xread", "xrevrange"),
)
# Inside of functions; the plain commands come with them.
WRITING = ("hdel", "hincrby", "hset", "hsetnx", "sadd", "srem", "xadd", "xdel", "zadd", "zpopmin", "zrem")
# Ending jobs, and what is looked at and loaded at the start.
GOVERNING = ("unlink", "function|load", "function|list", "config|get", "info")

ROLLOUT_FUNCTIONS = (
    *("version", "join", "beat", "end_lease", "enlist", "delist"),
    *("lease", "append", "restart", "hand_back", "fail", "requeue", "holders", "read_episode"),
    *("interrupt", "save_snapshot", "read_snapshot"),
    *("current_version", "describe_environment", "add_event"),
)

USERS: Mapping[str, Sequence[str]] = {
    "gspo-api": ("fcall", *CONNECTING, *READING, *WRITING, *GOVERNING),
    "gspo-trainer": ("fcall", *CONNECTING, *READING, *WRITING, *GOVERNING),
    "gspo-rollout": (*(f"fcall|gspo_{name}" for name in ROLLOUT_FUNCTIONS), *CONNECTING, *READING, *WRITING),
}


class UnsuitablePassword(ValueError):
    """A password file is missing, or what it holds is too short."""


def acl_file(passwords: Mapping[str, str]) -> str:
    """The lines of the file, for the passwords of all USERS."""
    # Nobody can be this user, but the server is: Redis 7.0 replays the transactions of its append-only file as it, and
    # drops them, with a line in its log, where it may do nothing.
    lines = ["user default off resetpass ~* &* +@all"]
    for user, commands in USERS.items():
        password = passwords.get(user, "")
        if len(password) < MIN_PASSWORD_CHARS:
            raise UnsuitablePassword(f"the password of {user} has fewer than {MIN_PASSWORD_CHARS} characters")
        digest = hashlib.sha256(password.encode()).hexdigest()
        granted = " ".join(f"+{command}" for command in commands)
        lines.append(f"user {user} on #{digest} resetchannels ~gspo:* -@all {granted}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.state.roles", description="Print the ACL file of Redis.")
    parser.add_argument("passwords", type=Path, help=f"a directory with the files {', '.join(USERS)}")
    directory: Path = parser.parse_args(arguments).passwords
    try:
        print(acl_file({user: (directory / user).read_text().strip() for user in USERS}), end="")
    except (OSError, UnsuitablePassword) as error:
        print(f"services.state.roles: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
