"""A replica in a process of its own, fed by a socket: killed and restarted, it gets the full state and continues."""

import contextlib
import socket
import struct

import pytest
import torch

from evermoe import optim
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender
from support.harness import PATIENCE, SERVER

NEEDS = b"n"


def read(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def serve(connection, layouts):
    """Length-prefixed messages; a length of 0 asks for the state. Each is answered, so that a test can count on it."""
    torch.set_num_threads(1)
    with Replica(layouts, log_bytes=100_000) as replica, contextlib.suppress(EOFError):
        while True:
            (size,) = struct.unpack("<Q", read(connection, 8))
            if size:
                received = replica.receive(read(connection, size))
                connection.sendall(NEEDS if received.needs_full_state else b"-")
            else:
                caught = replica.catch_up("model")
                connection.sendall(struct.pack("<QQ", caught.step, caught.digest))


class Node:
    """The process, and the trainer's end of the socket."""

    def __init__(self, layouts):
        self.connection, other = socket.socketpair()
        self.connection.settimeout(PATIENCE)
        self.process = SERVER.Process(target=serve, args=(other, layouts), daemon=True)
        self.process.start()
        other.close()

    def send(self, messages, sender):
        for message in messages:
            self.connection.sendall(struct.pack("<Q", len(message)))
            self.connection.sendall(message)
            if read(self.connection, 1) == NEEDS:
                sender.request_full_state("model")

    def state(self):
        self.connection.sendall(struct.pack("<Q", 0))
        return struct.unpack("<QQ", read(self.connection, 16))

    def kill(self):
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()


@pytest.fixture
def nodes():
    made = []
    yield made
    for node in made:
        node.kill()


def test_killed_replica_asks_for_the_full_state_and_continues(nodes):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(3001))
    optimizer = optim.AdamW([p])
    sender = GradientSender(optimizer, {"model": {"p": p}})
    nodes.append(Node(sender.layouts()))
    other = Replica(sender.layouts())  # a second one that lives on, to compare with
    asked = 0
    for step in range(60):
        if step in (20, 41):
            nodes[-1].kill()
            nodes.append(Node(sender.layouts()))
        p.grad = torch.randn(3001)
        optimizer.step()
        messages = sender.messages(step)
        asked += messages[0][5] == 3
        nodes[-1].send(messages, sender)
        for message in messages:
            other.receive(message)
        if step in (19, 30, 59):
            caught = other.catch_up("model")
            assert nodes[-1].state() == (step, caught.digest)
            assert torch.equal(caught.state[: 4 * 3001].view(torch.float32), p.detach())
    other.close()
    assert asked == 3, "at the start, and after each kill"
    assert [node.process.exitcode for node in nodes[:-1]] == [-9, -9]
