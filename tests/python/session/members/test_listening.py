"""Workers listen where they are to be reached, and nowhere else: read from the kernel's tables."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

import pytest

from evermoe.comm.endpoint import Endpoint, find_endpoint
from evermoe.comm.lighthouse import start_local_lighthouse
from support.harness import HEARTBEAT_LIMIT
from support.history import check_history

LISTENING = "0A"


def listening(pid):
    """Addresses and ports of a process's sockets that accept connections."""
    inodes = set()
    for file in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed since it was listed
            target = os.readlink(f"/proc/{pid}/fd/{file}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in inodes:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


@pytest.fixture
def local_lighthouse():
    server, address = start_local_lighthouse(heartbeat_timeout=HEARTBEAT_LIMIT, join_timeout=5)
    yield address
    server.shutdown()


@pytest.mark.parametrize(
    "address", [None, "127.0.0.2", "127.0.0.2,127.0.0.3,127.0.0.4"], ids=["loopback", "given", "several cards"]
)
@pytest.mark.few(2)
def test_workers_listen_on_one_address(start_job, local_lighthouse, address):
    job = start_job(2, address=address) if address else start_job(2, local_lighthouse)
    job.open_gate(3)
    workers = job.start_all({}, "ab", gated=True)
    for each in workers:
        each.wait_for("gate", step=3)
    found = [listening(each.pid) for each in workers]
    job.open_gate(10)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    assert all(len(each) >= 3 for each in found), "a store, a probe server and the port for copies"
    given = (address or "127.0.0.1").split(",")
    assert {each for some in found for each, _ in some} == {*given}
    for some in found:
        ports = [sum(each == card for each, _ in some) for card in given[1:]]
        assert ports == [1] * len(ports), "only copies and recoveries use further cards"


def test_a_host_whose_name_does_not_resolve_announces_its_address_on_the_way_to_the_lighthouse(monkeypatch, caplog):
    monkeypatch.setattr("socket.gethostname", lambda: "nameless.invalid")
    assert find_endpoint(None, ["http://127.0.0.9:1", "http://192.0.2.1:1"]) == Endpoint("127.0.0.1", None)
    assert "'nameless.invalid', does not resolve" in caplog.text
    assert "the address 127.0.0.1 of this process" in caplog.text
    assert "set EVERMOE_ADDRESS" in caplog.text


def test_a_loopback_address_is_warned_of_if_the_lighthouse_is_elsewhere(caplog):
    assert find_endpoint("127.0.0.1", ["http://127.0.0.1:1"]) == Endpoint("127.0.0.1", "127.0.0.1")
    assert caplog.text == ""
    assert find_endpoint("127.0.0.1", ["http://203.0.113.7:1"]) == Endpoint("127.0.0.1", "127.0.0.1")
    assert "address (EVERMOE_ADDRESS) is '127.0.0.1', by which no other host reaches it" in caplog.text
    assert "the Lighthouse is on 203.0.113.7" in caplog.text


@pytest.mark.parametrize(
    ("given", "lighthouse", "place"),
    [
        (None, "http://127.0.0.1:1", ("127.0.0.1", "127.0.0.1")),
        (None, "http://localhost:1", ("127.0.0.1", "127.0.0.1")),
        (None, "http://[::1]:1", ("127.0.0.1", "127.0.0.1")),
        (None, "http://10.1.2.3:1", ("here", None)),
        (None, "http://here:1", ("here", None)),  # its name may mean loopback here, and an address elsewhere
        ("127.0.0.3", "http://127.0.0.1:1", ("127.0.0.3", "127.0.0.3")),
        ("localhost", "http://10.1.2.3:1", ("localhost", "127.0.0.1")),
        ("127.0.0.3, localhost", "http://127.0.0.1:1", ("127.0.0.3", "127.0.0.3", ("127.0.0.1",))),
        ("192.0.2.1,127.0.0.2", "http://10.1.2.3:1", ("192.0.2.1", None, ("127.0.0.2",))),
        ("192.0.2.1", "http://10.1.2.3:1", ("192.0.2.1", None)),  # of no interface, as behind a translation
        ("no-such-host.invalid", "http://10.1.2.3:1", ("no-such-host.invalid", None)),
    ],
)
def test_place(monkeypatch, given, lighthouse, place):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    known = {"here": "127.0.1.1", "localhost": "127.0.0.1"}

    def look_up(host, port, *arguments, type=0):
        if not host[0].isdigit() and host not in known:
            raise OSError(f"{host} is not known")
        return [(2, 1, 6, "", (known.get(host, host), port or 0))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert find_endpoint(given, [lighthouse]) == Endpoint(*place)


def test_a_further_card_must_be_one_of_this_machine():
    with pytest.raises(ValueError, match=r"of a network card of this machine after a comma, got '192\.0\.2\.1'"):
        find_endpoint("127.0.0.1,192.0.2.1", ["http://127.0.0.1:1"])
