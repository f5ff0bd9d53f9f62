"""Settings: every field can be set, is documented, and a wrong value or name says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from services.process.settings import Settings, SettingsError, engine_addresses, load_settings, unread_names
from services.process.telemetry import configure_logging, tell_unread_settings


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"GSPO_{name.upper()}", raising=False)


def test_the_defaults_serve_one_machine_and_nobody_else() -> None:
    settings = load_settings()
    assert settings.api_host == "127.0.0.1"
    assert settings.api_keys == ()
    assert settings.redis_url is None
    assert settings.data_dir == Path.cwd() / ".gspo"


def test_values_are_read_and_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {
        "REDIS_URL": "redis://:secret@host:6379/1",
        "DATA_DIR": str(tmp_path),
        "API_PORT": "0",
        "API_KEYS": "first, second",
        "ENGINE_URLS": "http://a:1/, https://b, other+http://c/",
        "ENGINE_KEYS": "*=all, admin@a.example:1=one=two",
        "LEASE_S": "2.5",
        "MAX_ATTEMPTS": "20",
        "LOG_LEVEL": "DEBUG",
        "LOG_FORMAT": "json",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"GSPO_{name}", value)
    settings = load_settings()
    assert settings.redis_url == "redis://:secret@host:6379/1"
    assert settings.data_dir == tmp_path
    assert [key.get_secret_value() for key in settings.api_keys] == ["first", "second"]
    assert settings.engine_urls == ("http://a:1", "https://b", "other+http://c")
    assert [key.get_secret_value() for key in settings.engine_keys] == ["*=all", "admin@a.example:1=one=two"]
    assert (settings.api_port, settings.lease_s, settings.max_attempts) == (0, 2.5, 20)
    assert (settings.log_level, settings.log_format) == ("debug", "json")


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_API_KEYS", "open-sesame")
    monkeypatch.setenv("GSPO_REDIS_URL", "redis://:open-sesame@host")
    assert "open-sesame" not in repr(load_settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GSPO_REDIS_URL", "localhost:6379"),
        ("GSPO_API_PORT", "http"),
        ("GSPO_API_PORT", "65536"),
        ("GSPO_ENGINE_URLS", "http://a,b:3000"),
        ("GSPO_ENGINE_URLS", "Other+http://a"),
        ("GSPO_ENGINE_KEYS", "key"),
        ("GSPO_ENGINE_KEYS", "http://a:1=key"),
        ("GSPO_ENGINE_KEYS", "*=with space"),
        ("GSPO_LEASE_S", "0"),
        ("GSPO_LEASE_S", "nan"),
        ("GSPO_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        load_settings()


def test_a_bad_value_is_not_repeated_since_it_may_hold_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_REDIS_URL", "host:open-sesame")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "open-sesame" not in str(caught.value)


def test_an_empty_value_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_REDIS_URL", "")
    monkeypatch.setenv("GSPO_API_KEYS", "")
    assert load_settings() == Settings()


@pytest.mark.parametrize("name", ["GSPO_REDIS_URI", "GSPO_API_KEY", "GSPO_ENGINE_URL"])
def test_a_misspelt_name_is_an_error_that_names_the_right_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(SettingsError, match=f"{name} is not a setting; did you mean {name[:8]}"):
        load_settings()


def test_a_command_that_a_person_types_is_not_told_off_for_what_clients_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_API_KEY", "x")
    assert load_settings(is_typed=True) == Settings()
    monkeypatch.setenv("GSPO_ENGINE_URL", "x")
    with pytest.raises(SettingsError, match="GSPO_ENGINE_URL is not a setting"):
        load_settings(is_typed=True)


def test_names_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_TORCH_WHEELS", "/somewhere")
    load_settings()


def test_a_name_that_nothing_reads_is_told_and_those_of_clients_are_not() -> None:
    given = {"GSPO_TYPO": "1", "GSPO_EMPTY": "", "GSPO_URL": "u", "GSPO_TEST_SEED": "1", "GSPO_LEASE_S": "3", "X": "1"}
    assert unread_names(given) == ["GSPO_TYPO"]


def test_a_service_tells_such_names_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GSPO_TYPO", "1")
    try:
        configure_logging("test", log_format="json")
        tell_unread_settings()
    finally:
        structlog.reset_defaults()
    assert '"names": ["GSPO_TYPO"]' in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://h:0", "http://h:70000", "ftp://h", "http://a b"])
def test_what_is_no_address_is_no_engine(url: str) -> None:
    with pytest.raises(ValueError, match="every engine URL must"):
        engine_addresses([url])


def test_every_setting_is_documented() -> None:
    undocumented = [name for name, field in Settings.model_fields.items() if not field.description]
    assert undocumented == []
