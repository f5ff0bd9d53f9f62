"""A host's door to sandboxes that stand elsewhere: connections come through it, each is served, none leads further.

Rule: what is behind a wall learns no address and no key. A sandbox belongs to the connection that it was made over; it
is closed with it, and the relay with its host.
"""

from __future__ import annotations

import socket
import threading

from environments.sandbox.contract import Sandboxes
from services.hosts.sandboxes.server import serve_one
from services.hosts.sandboxes.table import Table

# On one connection: a session has one sandbox, and perhaps one more while it is brought back.
MOST_SANDBOXES = 4
CLOSED_WITHIN_S = 30.0


class Relay:
    """``theirs`` is the host's end, of the descriptor ``number``: pass it on, then close it here."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.number = self.theirs.fileno()
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, tuple[Table, socket.socket]] = {}
        self._admitting = threading.Thread(target=self._admit, name="sandbox door", daemon=True)
        self._admitting.start()

    def close(self) -> None:
        """Waits for its sandboxes to be gone."""
        self.theirs.close()
        _shut(self._ours)
        self._admitting.join()
        self._ours.close()
        with self._lock:
            served = dict(self._served)
        for table, connection in served.values():
            _shut(connection)
            table.close()
        for thread in served:
            thread.join(CLOSED_WITHIN_S)

    def _admit(self) -> None:
        while True:
            try:
                said, descriptors, _, _ = socket.recv_fds(self._ours, 16, 1)
            except OSError:
                return
            if not said:  # every process of the host is gone
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                table = Table(self._sandboxes, most=MOST_SANDBOXES)
                thread = threading.Thread(target=self._serve, args=(connection, table), name="sandbox", daemon=True)
                with self._lock:
                    self._served[thread] = (table, connection)
                thread.start()

    def _serve(self, connection: socket.socket, table: Table) -> None:
        try:
            serve_one(connection, table)
        finally:
            with self._lock:
                self._served.pop(threading.current_thread(), None)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        return
