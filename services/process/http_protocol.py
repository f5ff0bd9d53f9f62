"""HTTP on one connection: uvicorn's fast parser, with a bound on everything but bodies.

One rule: no client, authenticated or not, can make this process keep bytes without bound. Bodies are bounded where they
are read; the parser itself bounds neither the first line, nor headers, trailers or pipelined requests, and it accepts a
request that names no host, or two.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_WAITING = 100
"""Pipelined requests on one connection, behind the one in progress."""
_REASON = b"The headers are too long."
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REASON), _REASON)
)


class _Refused(Exception):
    """Why the connection is closed."""


class BoundedHttp(HttpToolsProtocol):
    _num_kept = 0
    """Bytes since the last end of headers, piece of a body or end of a request."""
    _refusal = ""

    def data_received(self, data: bytes) -> None:
        # In pieces, so that a body sent together with its head does not count as head.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[begin : begin + MAX_HEAD_BYTES]
            self._num_kept += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._num_kept > MAX_HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()
                return

    def on_headers_complete(self) -> None:
        self._num_kept = 0
        try:
            self._admit()
        except _Refused as refused:
            # Raising stops the parser, and uvicorn then calls ``send_400_response``.
            self._refusal = str(refused)
            raise
        super().on_headers_complete()

    def _admit(self) -> None:
        if len(self.pipeline) >= MAX_WAITING:
            raise _Refused("Too many requests are waiting on this connection.")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise _Refused("A request must name exactly one host.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal or msg)

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_kept = 0
        super().on_message_complete()
