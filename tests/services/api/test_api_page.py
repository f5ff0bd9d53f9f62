"""What the page about the API tells to type works as it is typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.state.server import RedisServer
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import ApiProcess

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url) as api:
        yield api


def block(language: str) -> str:
    """The first of the page: how a job is submitted and followed."""
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0])


def newest_job(api: ApiProcess) -> dict[str, Any]:
    job: dict[str, Any] = httpx.get(f"{api.url}/v1/jobs?order=desc").json()["data"][0]
    return job


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands(api: ApiProcess, store: Store) -> None:
    submit, follow = re.sub(r"\\\n\s*", "", block("sh")).replace("localhost:8000", api.url).splitlines()
    subprocess.run(submit, shell=True, check=True, capture_output=True)
    job = newest_job(api)
    assert job["model"] == ".gspo/models/calculator-tiny"
    httpx.post(f"{api.url}/v1/jobs/{job['id']}/cancel").raise_for_status()  # so that its events end
    shown = subprocess.run(
        follow,
        shell=True,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"JOB": job["id"]},
        timeout=HANG_S,
    )
    assert "event: job.status" in shown.stdout
    assert "event: end" in shown.stdout


def test_the_address_alone_leads_to_the_viewer(api: ApiProcess) -> None:
    assert httpx.get(api.url, follow_redirects=True).url.path == "/ui/"


def test_the_python_code(api: ApiProcess, store: Store) -> None:
    shown: list[str] = []

    def cancel_after_the_first(kind: str, data: dict[str, Any]) -> None:
        shown.append(f"{kind} {data['status']}")
        httpx.post(f"{api.url}/v1/jobs/{newest_job(api)['id']}/cancel")

    code = block("python").replace("http://127.0.0.1:8000", api.url)
    exec(code, {"print": cancel_after_the_first})
    assert shown == ["job.status queued", "job.status cancelled"]
