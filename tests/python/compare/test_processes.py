"""Measurements of a run's processes: their memory, their end, the bytes that they send."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from benches.compare.processes import family, kill, memory_bytes

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; hold = bytearray(b'1' * 80_000_000); "
    "print('held', flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    start_new_session=True)
print(child.stdout.readline(), child.pid, flush=True)
child.wait()
"""
SENDER = """
import socket
from benches.compare import loopback
if not loopback.enter():
    raise SystemExit(77)
with socket.create_server(("127.0.0.1", 0)) as server:
    before = loopback.sent_bytes()
    with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
        sender.sendall(b"x" * 1_000_000)
        got = 0
        while got < 1_000_000:
            got += len(receiver.recv(1 << 20))
    print(before, loopback.sent_bytes())
"""


def test_family_has_children_of_other_sessions_counts_their_memory_and_dies_completely():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "held\n"
    child = int(parent.stdout.readline())
    assert family(parent.pid) == [parent.pid, child]
    assert memory_bytes([parent.pid]) > memory_bytes([child]) > 80e6
    end_of_child = os.pidfd_open(child)
    kill(parent.pid)
    assert parent.wait(10) == -9
    assert select.select([end_of_child], [], [], 10)[0]
    os.close(end_of_child)
    parent.stdout.close()
    assert memory_bytes([parent.pid, child]) == 0


def test_network_of_its_own_counts_what_is_sent_and_nothing_else():
    done = subprocess.run([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("Linux allows no network namespace here")
    before, after = map(int, done.stdout.split())
    assert before == 0
    assert 1_000_000 < after < 1_100_000
