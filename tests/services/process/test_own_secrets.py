"""What a service was given in its environment is seen by itself and its children alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVICE = """
import ctypes, os, subprocess, sys
from services.process.own_secrets import hide_secrets, refuse_inspection

hide_secrets()
refuse_inspection()
tells = [sys.executable, "-c", "import os; print(os.environ['GSPO_REDIS_URL'])"]
in_child = subprocess.run(tells, stdout=subprocess.PIPE, text=True).stdout.strip()
is_inspectable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
print(os.environ["GSPO_REDIS_URL"], in_child, is_inspectable, flush=True)
sys.stdin.read()
"""
HIDDEN = {"GSPO_REDIS_URL": "redis://:hidden@here", "HF_TOKEN": "hidden", "GSPO_API_KEYS": "hidden"}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_service_knows_its_secrets_and_proc_does_not_tell_them() -> None:
    environment = {**os.environ, **HIDDEN, "GSPO_DATA_DIR": "/shown"}
    program = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(
        program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        assert service.stdin is not None
        url = HIDDEN["GSPO_REDIS_URL"]
        assert service.stdout.readline().split() == [url, url, "0"]
        told = Path(f"/proc/{service.pid}/environ").read_bytes()
        assert b"hidden" not in told
        assert b"GSPO_DATA_DIR=/shown" in told
        service.stdin.close()
