"""Optional OpenTelemetry traces (the extra ``otel``): where the time of one episode went.

Rule: without an endpoint nothing is imported, nothing is sent and a span costs one function call. The spans of an
episode share a trace id, which follows from its name, whichever workers play it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | int | float | bool


class TracingUnavailable(RuntimeError):
    """Traces are enabled, but their packages are not installed."""


class Spans(Protocol):
    """The interface for spans."""

    def trace(self, name: str, trace: str, **attributes: Attribute) -> AbstractContextManager[None]:
        """The outermost span, of the trace called ``trace``."""
        ...

    def span(self, name: str, **attributes: Attribute) -> AbstractContextManager[None]:
        """A piece of the span around it."""
        ...


class NoSpans:
    """Traces are disabled."""

    _nothing = contextlib.nullcontext()

    def trace(self, name: str, trace: str, **attributes: Attribute) -> AbstractContextManager[None]:
        return self._nothing

    def span(self, name: str, **attributes: Attribute) -> AbstractContextManager[None]:
        return self._nothing


class Traces:
    """Spans that are exported in the background; ``close`` sends what is left."""

    def __init__(self, exporter: SpanExporter, service: str, *, share: float = 1.0, **identity: str) -> None:
        """Records ``share`` of the traces, chosen by their names."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource({"service.namespace": "gspo", "service.name": service, **identity})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("gspo")
        self._share = share

    @contextlib.contextmanager
    def trace(self, name: str, trace: str, **attributes: Attribute) -> Iterator[None]:
        context = _context_of(trace, self._share)
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes):
            yield

    @contextlib.contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[None]:
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield

    def close(self) -> None:
        """Blocks until the rest is sent or has failed."""
        self._provider.shutdown()


def open_traces(endpoint: str, service: str, *, share: float = 1.0, **identity: str) -> Traces:
    """To a collector that speaks OTLP over HTTP. Raises ``TracingUnavailable``."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable(f"traces need the extra `otel`: pip install 'gspo[otel]' ({error})") from error
    return Traces(OTLPSpanExporter(endpoint=endpoint), service, share=share, **identity)


def _context_of(trace: str, share: float) -> Context:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    digest = hashlib.blake2b(trace.encode(), digest_size=24).digest()
    is_recorded = int.from_bytes(digest[16:], "big") < share * 2**64
    flags = TraceFlags(TraceFlags.SAMPLED if is_recorded else TraceFlags.DEFAULT)
    trace_id, span_id = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)))
