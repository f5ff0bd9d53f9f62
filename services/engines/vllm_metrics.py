"""How busy a vLLM is, read from the metrics that it serves for Prometheus. It asks nothing."""

from __future__ import annotations

import re

from services.engines.protocol import EngineLoad, EngineProtocolError

_RUNNING, _WAITING, _USED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_CACHE = re.compile(r'^vllm:cache_config_info\{[^}\n]*?kv_cache_size_tokens="(\d+)"', re.MULTILINE)


def load_in(text: str) -> EngineLoad:
    """The load of all its data-parallel ranks together; the metrics carry no date. Raises EngineProtocolError."""
    running, waiting = _values(text, _RUNNING), _values(text, _WAITING)
    if not running or not waiting:
        raise EngineProtocolError("its metrics do not tell how many requests run and wait: drop --disable-log-stats")
    sizes = [int(found) for found in _CACHE.findall(text)]
    held = sum(share * size for share, size in zip(_values(text, _USED), sizes, strict=False))
    return EngineLoad(
        num_running=int(sum(running)), num_waiting=int(sum(waiting)), num_held_tokens=round(held), age_s=0.0
    )


def _values(text: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"^{name}\{{[^}}\n]*\}} (\S+)$", text, re.MULTILINE)]
