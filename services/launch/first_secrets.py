"""Makes an installation's secrets once: Redis passwords, the first API key, engine keys, the token for environments.

Rule: existing secrets stay; each kind of process gets its own directory with only the secrets it needs. Redis and the
environments service get digests. Files are named like settings, for ``GSPO_SECRETS_DIR``.

``python -m services.launch.first_secrets ROOT``: ROOT/redis/users.acl and
ROOT/{api,engine,trainer,rollout,gateway,environments}/gspo_*.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from pydantic import SecretStr

from services.engines.keys import EngineKeys, KeyPair
from services.files.data_dir import SecretsDir
from services.state.roles import USERS, acl_file

KEY_BYTES = 32
ENGINE_CONFIG = "sglang.yaml"
# For health checks: unauthenticated clients may ping and do nothing else.
PROBE = "user gspo-probe on nopass resetkeys resetchannels -@all +ping\n"
ROLES = ("api", "trainer", "rollout", "gateway")


def make_secrets(root: Path, redis: str) -> None:
    """``redis``: the server's HOST:PORT as the processes reach it."""
    passwords, place = {}, SecretsDir(root)
    for role in ROLES:
        user = f"gspo-{role}"
        url = _keep(place.secret(role, "gspo_redis_url"), f"redis://{user}:{secrets.token_hex(KEY_BYTES)}@{redis}/0")
        password = urlsplit(url).password or ""
        # Keep the password; the server may have moved.
        _write(place.secret(role, "gspo_redis_url"), f"redis://{user}:{quote(password)}@{redis}/0")
        passwords[user] = password
    assert passwords.keys() == USERS.keys()
    _write(place.secret("redis", "users.acl"), acl_file(passwords) + PROBE)
    _keep(place.secret("api", "gspo_api_keys"), f"gspo-{secrets.token_urlsafe(KEY_BYTES)}")
    _make_engine_keys(place)
    token = _keep(place.secret("rollout", "gspo_env_token"), secrets.token_urlsafe(KEY_BYTES))
    _write(place.secret("gateway", "gspo_env_token"), token)
    _write(place.secret("environments", "gspo_env_token_sha256"), hashlib.sha256(token.encode()).hexdigest())


def _make_engine_keys(place: SecretsDir) -> None:
    """Workers and gateways only use engines: the key for control is the trainer's."""
    use = _keep(place.secret("rollout", "gspo_engine_keys"), f"*={secrets.token_urlsafe(KEY_BYTES)}")
    _write(place.secret("gateway", "gspo_engine_keys"), use)
    both = _keep(place.secret("trainer", "gspo_engine_keys"), f"{use},admin@*={secrets.token_urlsafe(KEY_BYTES)}")
    _write(place.secret("engine", "gspo_engine_keys"), both)
    keys = EngineKeys.read(map(SecretStr, both.split(","))).for_engine("http://engine")
    write_engine_config(place.secret("engine", ENGINE_CONFIG), keys)


def write_engine_config(path: Path, keys: KeyPair) -> None:
    """For SGLang's option --config: arguments can be read by every process of a machine."""
    entries = {"api-key": keys.use, "admin-api-key": keys.control}
    _write(path, "".join(f"{name}: {key}\n" for name, key in entries.items() if key is not None))


def _keep(path: Path, fresh: str) -> str:
    if not path.exists():
        _write(path, fresh)
    return path.read_text().strip()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.launch.first_secrets", description="Create the secrets of an installation, once."
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--redis", default="redis:6379", help="HOST:PORT of Redis (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        make_secrets(given.root, given.redis)
    except OSError as error:
        print(f"services.launch.first_secrets: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
