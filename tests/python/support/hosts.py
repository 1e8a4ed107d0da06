"""Hosts of their own on this machine: network namespaces on a switch whose cables can be cut. Needs root."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import os
import select
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import pytest

LIGHTHOUSE = "lighthouse"
"""The host of the tests themselves, and of the Lighthouse: it is on the switch, too."""
_TUNSETIFF, _TAP = 0x400454CA, 0x1002
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_FRAME_BYTES = 9000

Cable = tuple[str, str]
"""From one host to another: only what goes this way."""


@functools.cache
def may_make_hosts() -> bool:
    """Whether this process may make network namespaces and their devices."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        return False
    line = ["unshare", "-n", "ip", "tuntap", "add", "evermoe0", "mode", "tap"]  # goes with the namespace
    return not subprocess.run(line, capture_output=True, check=False).returncode


def need_namespaces() -> None:
    """Skips the test where this process may not make network namespaces."""
    if not may_make_hosts():
        pytest.skip("network namespaces need root and /dev/net/tun")


class Hosts:
    """Hosts with addresses of their own, that reach each other over a switch; `close` removes them.

    A cut drops frames without a word, as a host without power does, or a broken switch.
    """

    def __init__(self, server: Any, names: Iterable[str]) -> None:
        self.names = list(names)
        self._prefix, self._net = f"e{os.getpid()}", f"10.88.{os.getpid() % 250}"
        self._control, ours = server.Pipe()
        self._switch = server.Process(target=_switch, args=(ours, self._prefix, self._net, self.names), daemon=True)
        self._switch.start()
        ours.close()
        assert self._control.poll(20) and self._control.recv() == "ready"

    def network(self, name: str) -> dict[str, str]:
        """Arguments of `enter`."""
        number = self.names.index(name)
        return {
            "namespace": f"{self._prefix}{number}",
            "tap": f"{self._prefix}t{number}",
            "address": self.address(name),
        }

    def address(self, name: str) -> str:
        return f"{self._net}.{254 if name == LIGHTHOUSE else self.names.index(name) + 1}"

    def cut(self, *cables: Cable) -> None:
        """Drops what goes over these cables from now on, and over no others."""
        self._control.send(list(cables))
        assert self._control.poll(20) and self._control.recv() == "done"

    def split(self, *parts: str) -> None:
        """Hosts of one part reach each other and the Lighthouse, and none of another part."""
        pairs = itertools.permutations(parts, 2)
        self.cut(*((a, b) for one, other in pairs for a in one for b in other))

    def silence(self, name: str) -> None:
        """The host is without power: it reaches nobody, and nobody reaches it."""
        others = [*(each for each in self.names if each != name), LIGHTHOUSE]
        self.cut(*((name, each) for each in others), *((each, name) for each in others))

    def heal(self) -> None:
        self.cut()

    def delay(self, name: str, seconds: float) -> None:
        """Each frame from this host arrives later, from now on."""
        self._control.send((name, seconds))
        assert self._control.poll(20) and self._control.recv() == "done"

    def close(self) -> None:
        self._control.close()  # which ends the switch
        self._switch.join(10)
        for number in range(len(self.names)):
            subprocess.run(["ip", "netns", "delete", f"{self._prefix}{number}"], check=False, capture_output=True)


def enter(network: dict[str, str]) -> None:
    """Moves this process, which has one thread yet, to a host: its network, and its address as the host's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{network['namespace']}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "entering a namespace")
    socket.sethostname(network["address"])
    os.environ["GLOO_SOCKET_IFNAME"] = network["tap"]


def _switch(control: Connection, prefix: str, net: str, names: list[str]) -> None:
    """Forwards frames between the hosts' devices by the last byte of their addresses, until `control` is closed."""
    devices = {name: _open_device(prefix, net, number, name) for number, name in enumerate([*names, LIGHTHOUSE])}
    by_number = dict(enumerate(devices))
    cut: set[Cable] = set()
    late: dict[str, float] = {}
    waiting: deque[tuple[float, str, bytes]] = deque()
    control.send("ready")
    try:
        while True:
            patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([control, *devices.values()], [], [], patience)
            while waiting and waiting[0][0] <= time.monotonic():
                _, other, frame = waiting.popleft()
                os.write(devices[other], frame)
            for number, name in by_number.items():
                if devices[name] not in ready:
                    continue
                frame = os.read(devices[name], _FRAME_BYTES)
                to = by_number if frame[0] & 1 else [frame[5]]  # to all, or to one
                for other in (by_number.get(each) for each in to if each != number):
                    if other is not None and (name, other) not in cut:
                        if name in late:
                            waiting.append((time.monotonic() + late[name], other, frame))
                        else:
                            os.write(devices[other], frame)
            if control in ready:
                said = control.recv()
                late, cut = (dict([said]), cut) if isinstance(said, tuple) else (late, set(said))
                control.send("done")
    except (EOFError, OSError):
        return


def _open_device(prefix: str, net: str, number: int, name: str) -> int:
    tap, is_root = f"{prefix}t{number}", name == LIGHTHOUSE
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", tap.encode(), _TAP))
    inside = ["ip"] if is_root else ["ip", "-n", f"{prefix}{number}"]
    commands = [
        [*inside, "link", "set", tap, "address", f"02:00:00:00:00:{number:02x}", "mtu", "8000"],
        [*inside, "address", "add", f"{net}.{254 if is_root else number + 1}/24", "dev", tap],
        [*inside, "link", "set", tap, "up"],
    ]
    if not is_root:
        make = [["ip", "netns", "add", f"{prefix}{number}"], ["ip", "link", "set", tap, "netns", f"{prefix}{number}"]]
        commands = [*make, *commands, [*inside, "link", "set", "lo", "up"]]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    return device
