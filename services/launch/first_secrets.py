"""Makes an installation's secrets once: Redis passwords, the first API key, engine keys, the token for environments.

Rule: existing secrets stay, also the address of a Redis that somebody else runs; each kind of process gets its own
directory with only the secrets it needs. Redis and the environments service get digests. Files are named like settings,
for ``GSPO_SECRETS_DIR``.

``python -m services.launch.first_secrets ROOT``: ROOT/redis/users.acl, and ROOT/PROCESS/gspo_* for each process that
reads such a setting (``topology``).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import SecretStr

from services.engines.keys import EngineKeys, KeyPair
from services.files.data_dir import SecretsDir
from services.launch.topology import ENGINE, TRAINER, readers
from services.state.roles import USERS, UnsuitablePassword, acl_file

KEY_BYTES = 32
REDIS = "redis:6379"
ENGINE_CONFIG = "sglang.yaml"
# For health checks: unauthenticated clients may ping and do nothing else.
PROBE = "user gspo-probe on nopass resetkeys resetchannels -@all +ping\n"
ROLES = readers("redis_url")
DASHED = (
    "services.launch.first_secrets: a key of engines begins with a dash, with which SGLang does not start. For "
    "new ones remove {root}/rollout/gspo_engine_keys and {root}/trainer/gspo_engine_keys, run this again, and start "
    "engines, trainers, workers and gateways again"
)


class BadSecret(ValueError):
    """A file that is there cannot be gone on with; the message names it and says why."""


def make_secrets(root: Path, redis: str | None = None) -> None:
    """``redis``: the server's HOST:PORT as the processes reach it, where it is not where it was. Raises BadSecret, and
    has written nothing then."""
    place = SecretsDir(root)
    for path, text in {**_for_redis(place, redis), **_for_callers(place), **_for_engines(place)}.items():
        if _there(path) != text.strip():
            _write(path, text)


def _for_redis(place: SecretsDir, redis: str | None) -> dict[Path, str]:
    urls, passwords = {}, {}
    for role in ROLES:
        path, user = place.secret(role, "gspo_redis_url"), f"gspo-{role}"
        fresh = f"redis://{user}:{secrets.token_hex(KEY_BYTES)}@{redis or REDIS}/0"
        try:
            urls[path] = _moved(_there(path) or fresh, redis)
            passwords[user] = unquote(urlsplit(urls[path]).password or "")
        except ValueError as error:
            raise BadSecret(f"{path}: {error}") from error
    assert passwords.keys() == USERS.keys()
    try:
        return {**urls, place.secret("redis", "users.acl"): acl_file(passwords) + PROBE}
    except UnsuitablePassword as error:
        raise BadSecret(f"{place.path}/*/gspo_redis_url: {error}") from error


def _moved(url: str, redis: str | None) -> str:
    """All but the server stays: how it is spoken to, as whom, and which of its databases."""
    if redis is None:
        return url
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(f"a URL with {parts.scheme}:// has no HOST:PORT that could be {redis}")
    who, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{who}{at}{redis}"))


def _for_callers(place: SecretsDir) -> dict[Path, str]:
    """The keys of the API, and the token for starting environments elsewhere."""
    key, token = place.secret("api", "gspo_api_keys"), place.secret("rollout", "gspo_env_token")
    shown = _there(token) or secrets.token_urlsafe(KEY_BYTES)
    return {
        key: _there(key) or f"gspo-{secrets.token_urlsafe(KEY_BYTES)}",
        **{place.secret(role, "gspo_env_token"): shown for role in readers("env_token")},
        place.secret("environments", "gspo_env_token_sha256"): hashlib.sha256(shown.encode()).hexdigest(),
    }


def _for_engines(place: SecretsDir) -> dict[Path, str]:
    """Who plays episodes only uses engines: the key for control is the trainer's."""
    rollout, trainer = (place.secret(role, "gspo_engine_keys") for role in ("rollout", "trainer"))
    use = _there(rollout) or f"*={_engine_key()}"
    both = _there(trainer) or f"{use},admin@*={_engine_key()}"
    keys = EngineKeys.read(map(SecretStr, both.split(","))).for_engine("http://engine")
    control = (ENGINE.name, TRAINER.name)
    return {
        rollout: use,  # first: the trainer's are made of it
        **{place.secret(role, "gspo_engine_keys"): both if role in control else use for role in readers("engine_keys")},
        place.secret("engine", ENGINE_CONFIG): _engine_config(keys),
    }


def _engine_key() -> str:
    """SGLang makes arguments of its file, and takes a value that begins with a dash for the next option."""
    return f"engine-{secrets.token_urlsafe(KEY_BYTES)}"


def _engine_config(keys: KeyPair) -> str:
    entries = {"api-key": keys.use, "admin-api-key": keys.control}
    return "".join(f"{name}: {key}\n" for name, key in entries.items() if key is not None)


def write_engine_config(path: Path, keys: KeyPair) -> None:
    """For SGLang's option --config: arguments can be read by every process of a machine."""
    _write(path, _engine_config(keys))


def _there(path: Path) -> str:
    """Empty: nothing is."""
    return path.read_text().strip() if path.exists() else ""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _refused_by_sglang(place: SecretsDir) -> bool:
    """Whether an earlier release made an engine key that begins with a dash. The embedded engine takes such keys."""
    return any(
        line.partition(": ")[2].startswith("-") for line in _there(place.secret("engine", ENGINE_CONFIG)).split("\n")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.launch.first_secrets", description="Create the secrets of an installation, once."
    )
    parser.add_argument("root", type=Path)
    parser.add_argument(
        "--redis", metavar="HOST:PORT", help=f"where Redis is now (default: where it was; new: {REDIS})"
    )
    given = parser.parse_args(arguments)
    try:
        make_secrets(given.root, given.redis)
        if _refused_by_sglang(SecretsDir(given.root)):
            print(DASHED.format(root=given.root), file=sys.stderr)
    except (OSError, BadSecret) as error:
        print(f"services.launch.first_secrets: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
