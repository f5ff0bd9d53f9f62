"""A key that no request can carry is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gspo_core.cli import main
from gspo_core.client import Client, ClientError


@pytest.mark.parametrize("key", ["läuf", "two words", "k" * 256])
def test_a_key_that_cannot_be_sent_is_refused(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: sent.append(request) or httpx.Response(500))
    with Client(transport=transport) as client, pytest.raises(ClientError, match="1 to 255 characters of ASCII"):
        client.create_job({}, idempotency_key=key)
    assert sent == []
    assert main(["submit", str(tmp_path / "job.yaml"), "--key", key]) == 1
    assert f"--key {key!r}: a key is 1 to 255 characters" in capsys.readouterr().err
