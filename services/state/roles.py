"""The Redis permissions of each kind of process, as an ACL file that the server loads (``aclfile``).

The rule: anything not listed is forbidden; the default user is off; a rollout worker, which runs other people's
environments, and a gateway, which answers agents, may call only their own functions, load none, and reach no key but
ours. Passwords are read from files and appear as digests. Redis also checks a function's inner commands against its
caller, hence the plain commands.

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
    *("zcard", "zrange", "zscore", "xinfo|stream", "xlen", "xrange", "xread", "xrevrange", "time"),
)
# For use inside functions; a grant covers the plain commands too.
WRITING = ("hdel", "hincrby", "hset", "hsetnx", "sadd", "srem", "xadd", "xdel", "zadd", "zpopmin", "zrem")
# Ending jobs, and the checks and loads at startup.
GOVERNING = ("unlink", "function|load", "function|list", "config|get", "info")

ROLLOUT_FUNCTIONS = (
    *("version", "join", "beat", "end_lease", "enlist", "delist"),
    *("lease", "append", "restart", "hand_back", "fail", "requeue", "holders", "read_episode"),
    *("interrupt", "save_snapshot", "read_snapshot"),
    *("current_version", "describe_environment", "add_event"),
    *("hold_engine_watch", "leave_engine_watch", "sight_engines"),
)
# Its episodes are played by agents, whose keys it signs, to whom it offers them, and whose rewards may come late; all
# else is as for a rollout worker.
GATEWAY_FUNCTIONS = (
    *(*ROLLOUT_FUNCTIONS, "secret", "offer", "expire_loan", "loans", "holder_of"),
    *("await_reward", "look_at_reward", "post_reward", "remember_rewards"),
    *("use_talk_key", "give_back_talk_turns", "record_traffic", "drop_old_traffic"),
)

USERS: Mapping[str, Sequence[str]] = {
    "gspo-api": ("fcall", *CONNECTING, *READING, *WRITING, *GOVERNING),
    "gspo-trainer": ("fcall", *CONNECTING, *READING, *WRITING, *GOVERNING),
    "gspo-rollout": (*(f"fcall|gspo_{name}" for name in ROLLOUT_FUNCTIONS), *CONNECTING, *READING, *WRITING),
    "gspo-gateway": (*(f"fcall|gspo_{name}" for name in GATEWAY_FUNCTIONS), *CONNECTING, *READING, *WRITING),
}


class UnsuitablePassword(ValueError):
    """A password file is missing or its password is too short."""


def acl_file(passwords: Mapping[str, str]) -> str:
    """The lines of the file, for the passwords of all USERS."""
    # No client can log in as this user, but the server acts as it: Redis 7.0 replays transactions of its append-only
    # file as this user, and without permissions drops them with only a line in its log.
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
