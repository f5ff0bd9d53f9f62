"""What the doctor says of an address: that of an API, of something else, of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gspo_core.cli.doctor import examine
from gspo_core.cli.finding import Verdict

Told = Callable[..., tuple[Verdict, str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    def ask(url: str, answer: httpx.Response | None = None) -> tuple[Verdict, str]:
        def get(asked: str, **_: Any) -> httpx.Response:
            assert asked == "http://127.0.0.1:9/readyz"
            assert answer is not None
            return answer

        if answer is not None:
            monkeypatch.setattr(httpx, "get", get)
        *_, found = examine(url)
        return found.verdict, found.text

    monkeypatch.setattr("gspo_core.cli.service.checks", lambda: ())
    return ask


def test_a_slash_at_the_end_is_no_part_of_the_path(told: Told) -> None:
    verdict, text = told("127.0.0.1:9/", httpx.Response(200, json={"status": "ready"}))
    assert (verdict, text) == (Verdict.OK, "http://127.0.0.1:9 is ready")
    degraded = httpx.Response(200, json={"degraded": ["no engine"]})
    assert told("127.0.0.1:9", degraded) == (Verdict.NOTE, "http://127.0.0.1:9 answers, but: no engine")
    away = httpx.Response(503, json={"error": {"message": "no Redis"}})
    assert told("127.0.0.1:9", away) == (Verdict.PROBLEM, "http://127.0.0.1:9 is not ready: no Redis")


@pytest.mark.parametrize("content", ["[]", "null", "7", "<html>", '{"error": "no"}'])
def test_what_is_no_api_is_told_so(told: Told, content: str) -> None:
    for status in (404, 200) if "error" not in content else (503,):
        verdict, text = told("127.0.0.1:9", httpx.Response(status, text=content))
        assert verdict is Verdict.PROBLEM
        assert text.endswith(f"it is not a GSPO API (status {status})")


def test_what_is_no_address_is_told_so(told: Told) -> None:
    verdict, text = told("http://localhost:port")
    assert verdict is Verdict.PROBLEM
    assert text.startswith("http://localhost:port is no address")
