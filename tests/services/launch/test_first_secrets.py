"""The secrets of an installation: made once, one directory for each kind of process, and good for their Redis."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import stat
from pathlib import Path

import pytest
import redis
import yaml
from pydantic import SecretStr
from redis import Redis

from services.engines.keys import EngineKeys, KeyPair
from services.hosts.service import is_token
from services.launch.first_secrets import ROLES, main, make_secrets
from services.process.settings import Settings, SettingsError, load_settings
from services.state.server import RedisServer

SECRETS = {
    "api": {"gspo_redis_url", "gspo_api_keys"},
    "engine": {"gspo_engine_keys", "sglang.yaml"},
    "trainer": {"gspo_redis_url", "gspo_engine_keys"},
    "rollout": {"gspo_redis_url", "gspo_env_token", "gspo_engine_keys"},
    "gateway": {"gspo_redis_url", "gspo_env_token", "gspo_engine_keys"},
    "environments": {"gspo_env_token_sha256"},
    "redis": {"users.acl"},
}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"GSPO_{name.upper()}", raising=False)


def contents(root: Path) -> dict[str, dict[str, str]]:
    return {folder.name: {file.name: file.read_text() for file in folder.iterdir()} for folder in root.iterdir()}


def test_each_kind_of_process_gets_its_own_and_nothing_else(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    made = contents(tmp_path)
    assert {folder: set(files) for folder, files in made.items()} == SECRETS
    modes = {stat.S_IMODE(file.stat().st_mode) for folder in tmp_path.iterdir() for file in folder.iterdir()}
    assert modes == {0o600}
    values = [made[role]["gspo_redis_url"].split(":")[2].split("@")[0] for role in ROLES]
    values += [made["api"]["gspo_api_keys"], made["rollout"]["gspo_env_token"]]
    assert len(set(values)) == 6
    for value in values:
        assert len(value) >= 32
        assert not any(value in text for name in ("redis", "environments") for text in made[name].values())
    assert is_token(made["rollout"]["gspo_env_token"], made["environments"]["gspo_env_token_sha256"])
    assert not is_token("another", made["environments"]["gspo_env_token_sha256"])


def test_what_is_there_stays_and_follows_a_server_that_moves(tmp_path: Path) -> None:
    make_secrets(tmp_path, "redis:6379")
    before = contents(tmp_path)
    make_secrets(tmp_path, "redis:6379")
    assert contents(tmp_path) == before
    make_secrets(tmp_path, "elsewhere:7000")
    after = contents(tmp_path)
    assert after["redis"] == before["redis"]
    assert after["api"]["gspo_redis_url"] == before["api"]["gspo_redis_url"].replace("redis:6379", "elsewhere:7000")


def lead_to(root: Path, url: str) -> None:
    """``url`` has braces where the role is named."""
    for role in ROLES:
        (root / role / "gspo_redis_url").write_text(url.format(role=role))


ELSEWHERE = "rediss://gspo-{role}:p%40ss%2Fword-of-enough-characters@cache.example:6380/3?ssl_cert_reqs=none"


def test_a_redis_of_somebody_else_stays_where_it_is_and_is_given_the_passwords_that_clients_send(
    tmp_path: Path,
) -> None:
    make_secrets(tmp_path)
    lead_to(tmp_path, ELSEWHERE)
    before = contents(tmp_path)
    assert main([str(tmp_path)]) == 0
    after = contents(tmp_path)
    assert {role: after[role] for role in ROLES} == {role: before[role] for role in ROLES}
    sent = Redis.from_url(after["api"]["gspo_redis_url"]).get_connection_kwargs()["password"]
    assert sent == "p@ss/word-of-enough-characters"
    assert after["redis"]["users.acl"].count(f"#{hashlib.sha256(sent.encode()).hexdigest()} ") == len(ROLES)


def test_a_redis_that_moved_is_spoken_to_as_before(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    lead_to(tmp_path, ELSEWHERE)
    assert main([str(tmp_path), "--redis", "new.example:7000"]) == 0
    moved = (tmp_path / "api" / "gspo_redis_url").read_text()
    assert moved == ELSEWHERE.format(role="api").replace("cache.example:6380", "new.example:7000")


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("redis://gspo-{role}:short@redis:6379/0", (), "fewer than 16 characters"),
        ("redis://[::1/0", (), "rollout/gspo_redis_url: Invalid"),
        ("unix://gspo-{role}:of-enough-characters@/redis.sock", ("--redis", "a:1"), "no HOST:PORT"),
    ],
)
def test_what_cannot_be_gone_on_with_is_named_before_anything_is_written(
    url: str, options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_secrets(tmp_path)
    (tmp_path / "rollout" / "gspo_redis_url").write_text(url.format(role="rollout"))
    (tmp_path / "api" / "gspo_api_keys").unlink()
    before = contents(tmp_path)
    assert main([str(tmp_path), *options]) == 2
    assert told in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_an_engine_asks_for_what_the_others_show_and_only_the_trainer_may_control_it(tmp_path: Path) -> None:
    make_secrets(tmp_path, "redis:6379")
    pairs = {}
    for role in ("engine", "trainer", "rollout", "gateway"):
        entries = (tmp_path / role / "gspo_engine_keys").read_text().split(",")
        pairs[role] = EngineKeys.read(map(SecretStr, entries)).for_engine("http://engine:30000")
    use, control = pairs["engine"]
    assert use
    assert control
    assert use != control
    assert pairs["trainer"] == pairs["engine"]
    assert pairs["rollout"] == pairs["gateway"] == KeyPair(use)
    told = yaml.safe_load((tmp_path / "engine" / "sglang.yaml").read_text())
    assert told == {"api-key": use, "admin-api-key": control}


def test_sglang_takes_no_key_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes arguments of its file: ``--api-key -x`` would be two options."""
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: "-" + size * "x")
    make_secrets(tmp_path)
    told = yaml.safe_load((tmp_path / "engine" / "sglang.yaml").read_text())
    parser = argparse.ArgumentParser()
    for name in told:
        parser.add_argument(f"--{name}")
    read = parser.parse_args([word for name, key in told.items() for word in (f"--{name}", key)])
    assert list(vars(read).values()) == list(told.values())


def test_a_key_that_sglang_refuses_stays_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for role, keys in (("rollout", "*=-use"), ("trainer", "*=-use,admin@*=control")):
        (tmp_path / role / "gspo_engine_keys").write_text(keys)
    assert main([str(tmp_path)]) == 0
    assert f"remove {tmp_path}/rollout/gspo_engine_keys and {tmp_path}/trainer/" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "engine" / "sglang.yaml").read_text())["api-key"] == "-use"


def test_processes_read_them_as_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_secrets(tmp_path, "redis:6379")
    monkeypatch.setenv("GSPO_SECRETS_DIR", str(tmp_path / "api"))
    settings = load_settings()
    assert settings.redis_url == (tmp_path / "api" / "gspo_redis_url").read_text()
    assert [key.get_secret_value() for key in settings.api_keys] == [(tmp_path / "api" / "gspo_api_keys").read_text()]
    monkeypatch.setenv("GSPO_SECRETS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="GSPO_SECRETS_DIR"):
        load_settings()


def test_the_probe_may_ask_whether_redis_lives_and_nothing_else(tmp_path: Path) -> None:
    make_secrets(tmp_path, "redis:6379")
    with RedisServer.spawn(tmp_path / "server") as server:
        path = server.url.removeprefix("unix://").split("?")[0]
        admin = redis.Redis(unix_socket_path=path)
        for line in (tmp_path / "redis" / "users.acl").read_text().splitlines()[1:]:
            admin.execute_command("ACL", "SETUSER", *line.split()[1:])
        probe = redis.Redis(unix_socket_path=path, username="gspo-probe", password="x")
        assert probe.ping()
        for command in (("GET", "gspo:x"), ("INFO",), ("FUNCTION", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                probe.execute_command(*command)
        api_url = (tmp_path / "api" / "gspo_redis_url").read_text()
        password = api_url.split(":")[2].split("@")[0]
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in (tmp_path / "redis" / "users.acl").read_text()
        admin.close()
        probe.close()
