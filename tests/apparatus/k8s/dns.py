"""Names of a cluster, for a test: ``NAME.NAMESPACE.svc.cluster.local`` of Services and of the pods of headless ones.

Runs in a pod with nothing but Python. It asks the API server with the pod's own token, at most once a second, and
answers over UDP and TCP. What it does not know does not exist: it leads nowhere outside.
"""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import struct
import threading
import time
import urllib.request
from typing import Any

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
DOMAIN = "svc.cluster.local"
FRESH_S = 1.0


class Names:
    """Addresses by name."""

    def __init__(self) -> None:
        self._lock, self._read_at = threading.Lock(), 0.0
        self._table: dict[str, list[str]] = {}
        self._context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")

    def find(self, name: str) -> list[str] | None:
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                self._table, self._read_at = self._read(), time.monotonic()
            return self._table.get(name)

    def _ask(self, what: str) -> list[dict[str, Any]]:
        with open(f"{ACCOUNT}/token", encoding="ascii") as token:
            asked = urllib.request.Request(
                f"https://10.96.0.1/api/v1/{what}", headers={"Authorization": f"Bearer {token.read()}"}
            )
        with urllib.request.urlopen(asked, context=self._context, timeout=5) as answer:
            items: list[dict[str, Any]] = json.load(answer)["items"]
            return items

    def _read(self) -> dict[str, list[str]]:
        table: dict[str, list[str]] = {}
        headless = set()
        for one in self._ask("services"):
            name = f"{one['metadata']['name']}.{one['metadata']['namespace']}.{DOMAIN}"
            if one["spec"].get("clusterIP") == "None":
                headless.add(name)
                table[name] = []
            else:
                table[name] = [one["spec"]["clusterIP"]]
        for one in self._ask("endpoints"):
            name = f"{one['metadata']['name']}.{one['metadata']['namespace']}.{DOMAIN}"
            if name not in headless:
                continue
            for subset in one.get("subsets") or ():
                for address in subset.get("addresses") or ():
                    table[name].append(address["ip"])
                    if address.get("hostname"):
                        table[f"{address['hostname']}.{name}"] = [address["ip"]]
        return table


NAMES = Names()


def answer(query: bytes) -> bytes:
    """Of one question: A records, an empty answer for other types, or that there is no such name."""
    at, labels = 12, []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii").lower())
        at += query[at] + 1
    is_a = query[at + 1 : at + 3] == b"\0\1"
    addresses = NAMES.find(".".join(labels))
    records = b"".join(
        b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(one) for one in (addresses or []) if is_a
    )  # a second: addresses of pods change
    flags = 0x8500 | 0x80 | (3 if addresses is None else 0)
    return query[:2] + struct.pack(">HHHHH", flags, 1, len(records) // 16, 0, 0) + query[12 : at + 5] + records


class OverUdp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        query, server = self.request
        server.sendto(answer(query), self.client_address)


class OverTcp(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while length := self.rfile.read(2):
            said = answer(self.rfile.read(struct.unpack(">H", length)[0]))
            self.wfile.write(struct.pack(">H", len(said)) + said)


class Udp(socketserver.ThreadingUDPServer):
    daemon_threads = True


class Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True


if __name__ == "__main__":
    threading.Thread(target=Tcp(("", 53), OverTcp).serve_forever, daemon=True).start()
    Udp(("", 53), OverUdp).serve_forever()
