"""A proxy before an object store that delays, cuts, answers errors, or holds requests, as a test says.

It lets one conditional write of a key through at a time: some servers check first and write then.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from typing import Literal, NamedTuple

CHANGES = ("PUT", "POST", "DELETE")


class Request(NamedTuple):
    """Requests that the proxy has received."""

    number: int
    """From 1 on, among those with the same kind of method: those that change something, and all others."""
    method: str
    path: str

    @property
    def changes(self) -> bool:
        return self.method in CHANGES


class Fault(NamedTuple):
    """Handle a request."""

    kind: Literal["cut", "cut after", "status", "delay", "hold", "hold after"]
    """`after`: the server gets the request, and the client no answer."""
    value: float = 0.0
    """Status, or seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


class Proxy:
    """Passes requests on to a port of this machine.

    Args:
        upstream: the port.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.held = threading.Event()
        """Set when a request is held."""
        self.released = threading.Event()
        """Ends all holding; what was held before the server got it is dropped."""
        self.requests: list[Request] = []
        self._counts: collections.Counter[bool] = collections.Counter()
        self._lock = threading.Lock()
        self._keys: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def reset(self, fault: Callable[[Request], Fault | None] = lambda request: None) -> None:
        """Counts from 1 again, with other faults."""
        self.released.set()
        self.held, self.released = threading.Event(), threading.Event()
        self._counts.clear()
        self.requests, self.fault = [], fault

    def kills(self, process: BaseProcess, number: int, kind: Literal["hold", "hold after"]) -> bool:
        """Starts a process and kills it at its `number`th change; False if it came to its end before."""
        self.reset(lambda request: Fault(kind) if request.changes and request.number == number else None)
        process.start()
        while not self.held.wait(0.02) and process.is_alive():
            pass
        was_held = self.held.is_set()
        process.kill()
        process.join()
        self.reset()
        assert was_held or process.exitcode == 0
        return was_held

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def note(self, method: str, path: str) -> Request:
        with self._lock:
            self._counts[method in CHANGES] += 1
            request = Request(self._counts[method in CHANGES], method, path)
            self.requests.append(request)
            return request

    def one_at_a_time(self, path: str) -> threading.Lock:
        with self._lock:
            return self._keys[path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *arguments: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy, released, held = self.proxy, self.proxy.released, self.proxy.held
        fault = proxy.fault(proxy.note(self.command, self.path)) or Fault("delay")
        if fault.kind == "hold":
            held.set()
            released.wait()
        if fault.kind in ("hold", "cut"):
            self.close_connection = True
            return
        if fault.kind == "status":
            self._answer(int(fault.value), [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault.kind == "delay":
            time.sleep(fault.value)
        is_conditional = "If-None-Match" in self.headers and self.command == "PUT"
        with proxy.one_at_a_time(self.path) if is_conditional else contextlib.nullcontext():
            found = self._upstream(body)
        if fault.kind == "hold after":
            held.set()
            released.wait()
        if found is None or fault.kind in ("cut after", "hold after"):
            self.close_connection = True
            return
        self._answer(*found)

    def _upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(body)))
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A proxy for as long as the block lasts."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
