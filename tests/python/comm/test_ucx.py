"""Messages over UCX, and the error of a member without its library; `tests/transport.rs` tests the messages."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import evermoe
from evermoe.comm.transport import Transport, find_ucx
from evermoe.errors import PeerLost
from support.ranks import run_ranks

pytest.importorskip("libucx", reason="needs the package libucx-cu12")

NBYTES = 8 << 20
LIMIT = timedelta(seconds=20)


def connected(group, carrier):
    transport = Transport("127.0.0.1", "127.0.0.1", carrier=carrier)
    addresses = [data.decode() for data in group.all_gather_bytes(transport.address.encode())]
    transport.connect(1, group.rank, addresses, LIMIT, LIMIT)
    return transport


def exchange(group):
    """Send from each rank to the other at the same time; return the received data, and whether the process uses UCX."""
    transport, other = connected(group, "ucx"), 1 - group.rank
    mine = torch.full((NBYTES,), 1 + group.rank, dtype=torch.uint8)
    room = torch.zeros(2 * NBYTES, dtype=torch.uint8)
    coming = [transport.receive(part, other, 7) for part in room.split(NBYTES)]
    for part in (mine, mine[: NBYTES // 2]):
        transport.send(part, other, 7).wait()
    for transfer in coming:
        transfer.wait()
    group.all_reduce(torch.zeros(1))
    transport.close()
    return room, "libucp" in Path("/proc/self/maps").read_text()


def test_messages_arrive_completely_and_may_be_shorter_than_their_buffers(tmp_path):
    for rank, (room, has_ucx) in enumerate(run_ranks(tmp_path, 2, exchange)):
        assert has_ucx
        assert (room[: NBYTES * 3 // 2] == 2 - rank).all()
        assert not room[NBYTES * 3 // 2 :].any()


def exchange_in_vain(group):
    transport = connected(group, "ucx" if group.rank else "tcp")
    with pytest.raises(PeerLost) as failure:
        transport.receive(torch.zeros(NBYTES, dtype=torch.uint8), 1 - group.rank, 7).wait()
    group.all_reduce(torch.zeros(1))
    return str(failure.value)


def test_members_with_different_transports_get_an_error(tmp_path):
    for words in run_ranks(tmp_path, 2, exchange_in_vain):
        assert "its transport is " in words
        assert "expected the same on all members of a job" in words


SESSION = """
import torch, evermoe
layer = evermoe.MoE(8, 16, 4)
evermoe.Session(layer, torch.optim.SGD(layer.parameters(), lr=0.1), evermoe.ElasticSampler(64, 8),
                membership=evermoe.Membership(transport="ucx"))
"""


@pytest.mark.parametrize(("library", "why"), [("/no/libucp.so.0", "cannot open"), ("libc.so.6", "it has no ucp_")])
@pytest.mark.long
def test_a_session_without_the_library_names_what_it_tried(library, why, monkeypatch):
    monkeypatch.setenv("EVERMOE_UCX", library)
    assert find_ucx() == [library]
    done = subprocess.run([sys.executable, "-c", SESSION], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f'ValueError: transport: "ucx" needs UCX 1.16 or newer, and found none ({library}: ')
    assert why in last
    assert 'or use transport "tcp"' in last


def test_the_option_has_two_values():
    assert evermoe.Membership().transport == "tcp"
    with pytest.raises(ValueError, match="transport"):
        evermoe.Membership(transport="rdma")
