"""Counts and durations of this process's requests, for `/metrics`.

One rule: labels come from the table of routes, never from a caller, so their number is bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from starlette.types import Scope

# They would add an unused series for each of the others.
disable_created_metrics()  # type: ignore[no-untyped-call]

UNKNOWN = "unknown"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Traffic:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("gspo_http_requests", "Requests answered", labels, registry=self.registry)
        self._seconds = Histogram(
            "gspo_http_request_duration_seconds",
            "From the first byte of a request to the last byte of its answer; streams excluded",
            ("route",),
            registry=self.registry,
        )

        self._pushed = Counter(
            "gspo_pushed_trajectories",
            "Trajectories pushed over HTTP, by outcome",
            ("fate",),
            registry=self.registry,
        )

    def count_pushed(self, fate: str) -> None:
        """``fate`` is ``accepted`` or one of a few reasons for refusal."""
        self._pushed.labels(fate).inc()

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNKNOWN)
        method = scope["method"] if scope["method"] in METHODS else UNKNOWN
        self._requests.labels(method, route, str(status)).inc()
        if not route.endswith("/events"):
            self._seconds.labels(route).observe(seconds)
