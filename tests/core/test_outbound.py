"""Addresses that a caller's URL may lead to: a table, a resolver that changes its mind, and real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest

from gspo_core.outbound import AddressRefused, check_url, is_allowed, is_public, parse_networks
from tests.patience import HANG_S

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1", "::ffff:8.8.8.8", "93.184.215.14"]
NOT_PUBLIC = [
    *("127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "0.0.0.0", "::"),
    *("169.254.169.254", "fd00:ec2::254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("100.64.0.1", "100.100.100.200", "198.18.0.1", "198.51.100.1", "203.0.113.9", "240.0.0.1", "255.255.255.255"),
    *("fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "ff0e::1", "224.0.0.1", "239.1.1.1"),
    *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001::1", "::127.0.0.1"),
    *("192.0.0.8", "192.88.99.1", "192.0.2.1", "2001:db8::1", "168.63.129.16"),
    *("::ffff:0:7f00:1", "::ffff:0:a9fe:a9fe", "4000::1", "5f00::1", "1::1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str):
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_all_others_are_not(address: str):
    assert not is_public(address)


def to(*addresses: str):  # type: ignore[no-untyped-def]
    return lambda host, port: addresses


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://a.example/",
            "file:///etc/passwd",
            "gopher://a.example",
            "javascript:1",
            "//a.example",
            "a.example",
            "",
        ),
        *("https://", "https:///x", "https://user@a.example/", "https://user:pw@a.example/", "https://@a.example"),
        *("http://a.example/", "ws://a.example/", "https://a.example:22/", "https://a.example:6379/"),
        *("https://a.example:99999/", "https://a.example:x/", "https://a.example/ x", "https://a.ex\nample/"),
        "https://a.example/" + "x" * 3000,
        "https://[::1",
    ],
)
def test_urls_that_are_none_of_ours_are_refused_wherever_they_lead(url: str):
    with pytest.raises(AddressRefused):
        check_url(url, (), to("8.8.8.8"))


@pytest.mark.parametrize("url", ["https://a.example/x?y=1", "wss://a.example/ws", "https://a.example:8443/"])
def test_good_urls_pass_if_every_address_is_public(url: str):
    check_url(url, (), to("8.8.8.8", "2606:4700::1"))
    for bad in NOT_PUBLIC:
        with pytest.raises(AddressRefused):
            check_url(url, (), to("8.8.8.8", bad))
    with pytest.raises(AddressRefused, match="cannot be resolved"):
        check_url(url, (), to())


@pytest.mark.parametrize(
    "host", ["127.1", "0x7f000001", "2130706433", "017700000001", "127.0.0.1.", "localhost", "[::1]", "[::ffff:7f00:1]"]
)
def test_odd_spellings_of_this_machine_are_judged_by_what_the_system_makes_of_them(host: str):
    with pytest.raises(AddressRefused):
        check_url(f"https://{host}/", ())


def test_networks_of_the_operator_are_allowed_with_any_port_and_in_the_clear():
    networks = parse_networks(["10.1.0.0/16", "fd00::/8"])
    check_url("ws://world.internal:9000/ws", networks, to("10.1.2.3"))
    check_url("http://world.internal/", networks, to("fd00::5"))
    assert is_allowed("::ffff:10.1.2.3", networks)
    with pytest.raises(AddressRefused):
        check_url("ws://world.internal:9000/ws", networks, to("10.1.2.3", "10.2.0.1"))
    with pytest.raises(AddressRefused):
        check_url("ws://world.internal:9000/ws", networks, to("8.8.8.8"))


GUARDED = """
import asyncio, socket, sys, urllib.request
from gspo_core.outbound import AddressRefused, guard_connections, parse_networks
port, allowed = int(sys.argv[1]), sys.argv[2:]
answers = iter(["93.184.215.14"] + ["127.0.0.1"] * 50)
real = socket.getaddrinfo
def rebinding(host, *args, **kwargs):
    # A public address when the URL is judged, this machine when it is used.
    return real(next(answers) if host == "rebind.example" else host, *args, **kwargs)
socket.getaddrinfo = rebinding
from gspo_core.outbound import check_url
check_url("https://rebind.example:8443/", ())
guard_connections(parse_networks(allowed))

def by_socket(host):
    with socket.create_connection((host, port), timeout=5): pass
def by_urllib(host):
    urllib.request.urlopen(f"http://{host}:{port}/", timeout=5)
def by_asyncio(host):
    async def go():
        reader, writer = await asyncio.open_connection(host, port)
        writer.close()
    asyncio.run(go())
def by_datagram(host):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender: sender.sendto(b"x", ("127.0.0.1", port))
def by_raw(host):
    with socket.socket() as one: one.connect(("127.0.0.1", port))
for connect in (by_socket, by_urllib, by_asyncio, by_datagram, by_raw):
    for host in ("rebind.example", "127.0.0.1", "localhost", "127.1"):
        try:
            connect(host)
        except AddressRefused:
            print("refused")
        except Exception as error:
            print("refused" if "not allowed" in repr(error) else repr(error))
        else:
            print("connected")
"""


@pytest.mark.parametrize(("networks", "said"), [([], "refused"), (["127.0.0.0/8", "::1/128"], "connected")])
def test_a_guarded_process_reaches_no_address_that_is_not_allowed_however_it_asks(networks: list[str], said: str):
    """With a resolver that says something else the second time. The listener counts what arrives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        program = [sys.executable, "-c", textwrap.dedent(GUARDED), str(port), *networks]
        if networks:
            program[2] = program[2].replace("by_urllib, ", "")  # nobody answers it
        done = subprocess.run(program, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == (16 if networks else 20)
        assert set(lines) == {said}, done.stdout
        if not networks:
            with pytest.raises(TimeoutError):
                listener.accept()
