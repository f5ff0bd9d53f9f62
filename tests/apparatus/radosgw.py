"""A real server of S3 on this machine, without a cluster behind it: Ceph's object gateway, which keeps what it is given
in a file of SQLite. ``tests/apparatus/get_radosgw.sh`` gets it.

What keeps it so is unfinished: of an object that is sent in several parts, the last one alone is there afterwards
(18.2.7), so whoever uses it sends each object in one request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx

from services.process.ports import free_port

REGION = "us-east-1"
START_S = 60


class Account(NamedTuple):
    """Where a store of S3 answers, and as whom it is asked."""

    address: str
    key: str
    secret: str


@contextmanager
def radosgw(programs: Path, folder: Path) -> Iterator[Account]:
    """``folder``: for what it keeps."""
    (data := folder / "data").mkdir(parents=True)
    account = Account(f"http://127.0.0.1:{free_port()}", secrets.token_hex(10), secrets.token_hex(20))
    common = [
        *("--no-mon-config", "-n", "client.rgw", "-c", "/dev/null", "--rgw-backend-store=dbstore", "--admin-socket="),
        *("--rgw-config-store=dbstore", f"--dbstore-config-uri=file:{data}/config.db"),
        *(f"--rgw-data={data}", f"--dbstore-db-dir={data}", f"--run-dir={folder}", f"--log-file={folder}/log"),
    ]
    user = [f"--access-key={account.key}", f"--secret-key={account.secret}", "--uid=tests", "--display-name=tests"]
    subprocess.run([programs / "radosgw-admin", *common, "user", "create", *user], check=True, capture_output=True)
    frontend = f"--rgw-frontends=beast endpoint={account.address.removeprefix('http://')}"
    process = subprocess.Popen([programs / "radosgw", *common, frontend, "-f"], stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_answers(process, account.address)
        yield account
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None:
        try:
            httpx.get(address, timeout=1.0)
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    raise AssertionError(f"radosgw ended with {process.returncode}")


def make_bucket(account: Account, name: str) -> None:
    """With a signature (version 4), which a real server asks for."""
    path, now = f"/{name}", datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": account.address.removeprefix("http://"), "x-amz-content-sha256": empty, "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{header}:{value}\n" for header, value in headers.items())
    request = hashlib.sha256(f"PUT\n{path}\n\n{lines}\n{names}\n{empty}".encode()).hexdigest()
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    key = f"AWS4{account.secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}".encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={account.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}"
    httpx.put(f"{account.address}{path}", headers=headers).raise_for_status()
