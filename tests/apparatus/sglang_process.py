"""A real SGLang server on this machine's CPU, as a child process, from the environment that ``sglang_cpu`` sets up.

Rule: SGLang is reached over HTTP only and never imported; its settings here are those that make it answer on a CPU.
Its processes end with this one, or with ``close``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx

from services.launch.stack import Child, StackError
from services.process.ports import free_port

# On a busy machine its imports alone take a minute.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
_OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "32768", "--sleep-on-idle", "--log-level", "warning"),
)
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a health check fails while the engine is paused
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class SGLangProcess:
    """Answers when the constructor returns."""

    def __init__(self, venv: Path, model_dir: Path, log_path: Path, *options: str) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            raise StackError(f"{venv} holds no environment for SGLang: make one with `make sglang-cpu`")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        where = ("--model-path", str(model_dir), "--host", "127.0.0.1", "--port", str(port))
        argv = [str(python), "-m", "sglang.launch_server", *where, *_OPTIONS, *options]
        self._child = Child("sglang", argv, {**os.environ, **_ENVIRONMENT}, log_path)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise StackError(f"SGLang ended while it started:\n{self._child.last_words()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise StackError(f"SGLang did not answer within {START_TIMEOUT_S:.0f} s:\n{self._child.last_words()}")

    def close(self) -> None:
        self._child.stop(time.monotonic() + STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # its workers are of its own process group
            os.killpg(self.pid, signal.SIGKILL)
