"""HTTP on one connection: uvicorn's fast parser, and a bound on what it is sent that is no body.

One rule: nobody can make this process keep bytes without end, not even before it is known who asks. Bodies are bounded
where they are read; for the first line, the headers and what may follow a body, the parser has no bound.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
_REASON = b"The headers are too long."
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REASON), _REASON)
)


class BoundedHttp(HttpToolsProtocol):
    _num_kept = 0
    """Bytes received since the last end of headers, piece of a body or end of a request."""

    def data_received(self, data: bytes) -> None:
        # In pieces, so that a body that comes with its head is not taken for a long head.
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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_kept = 0
        super().on_message_complete()
