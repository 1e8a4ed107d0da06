"""Real servers of object stores on this machine, each with a folder of its own, to be killed and started again."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evermoe.config.environment import free_port
from support.harness import wait_until

ROOT = Path(__file__).parents[3]
S3_SERVER = ROOT / "target" / "tools" / "bin" / "s3s-fs"
AZURE_SERVER = ROOT / "target" / "tools" / "node_modules" / ".bin" / "azurite-blob"
KEY, SECRET = "evermoe", "not-to-be-logged"
AZURE_KEY = base64.b64encode(SECRET.encode()).decode()
ADDRESS = "EVERMOE_TEST_PLACE"
"""Variable with a URL below which tests may write, with the credentials of its provider's own chain."""
MAX_END = 20.0


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class S3Server:
    """s3s-fs, whose buckets are folders below its own."""

    secret = SECRET

    def __init__(self, folder: Path, bucket: str = "bucket", *, is_public: bool = False) -> None:
        self.folder, self.bucket, self.port, self._is_public = folder, bucket, free_port(), is_public
        (folder / bucket).mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [S3_SERVER, "--host", "127.0.0.1", "--port", str(self.port)]
        command += [] if self._is_public else ["--access-key", KEY, "--secret-key", SECRET]
        command.append(self.folder)
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"RUST_LOG": "error"})
        wait_until(lambda: answers(self.port), "s3s-fs listens")

    def move(self) -> None:
        """Another address from its next start on."""
        self.port = free_port()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables by which a client finds it; with another port over a proxy."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        return ({"AWS_SKIP_SIGNATURE": "true"} if self._is_public else keys) | {
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
        }


class AzureServer:
    """Azurite, with one container; without a folder what is in it ends with the process."""

    secret = AZURE_KEY

    def __init__(self, folder: Path | None = None, container: str = "container") -> None:
        self.port, self._folder, self._container = free_port(), folder, container
        self.url = f"az://{container}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self._make_container()

    def start(self) -> None:
        command = [
            AZURE_SERVER,
            "--blobPort",
            str(self.port),
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]
        command += ["--inMemoryPersistence"] if self._folder is None else ["--location", self._folder]
        accounts = {"AZURITE_ACCOUNTS": f"{KEY}:{AZURE_KEY}"}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | accounts)
        wait_until(lambda: answers(self.port), "Azurite listens")

    def move(self) -> None:
        """Another address from its next start on."""
        self.port = free_port()

    def kill(self) -> None:
        """Ends it. One with a folder writes what it has answered for, as the real service has before it answers:
        Azurite alone does so every five seconds."""
        assert self._process is not None
        if self._folder is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(MAX_END)
        self._process.kill()
        self._process.wait()

    def _make_container(self) -> None:
        """Signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key has it."""
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        path = f"/{KEY}/{self._container}"
        signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-08-06\n/{KEY}{path}\nrestype:container"
        mark = base64.b64encode(hmac.digest(SECRET.encode(), signed.encode(), "sha256")).decode()
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Authorization": f"SharedKey {KEY}:{mark}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("PUT", f"{path}?restype=container", headers=headers | {"Content-Length": "0"})
        response = connection.getresponse()
        assert response.status == 201, response.read()
        connection.close()

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Variables by which a client finds it; with another port over a proxy."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": KEY,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port or self.port}/{KEY}",
            "AZURE_ALLOW_HTTP": "true",
        }


class GivenAddress:
    """A place of the user's own, where one is named."""

    def __init__(self) -> None:
        self.url = os.environ[ADDRESS].rstrip("/")

    def environment(self) -> dict[str, str]:
        return {}


def need(server: Path) -> None:
    """Skips a test where a server is not built; in CI it must be."""
    if not server.exists():
        assert "CI" not in os.environ, f"{server} is missing: make {server.relative_to(ROOT)}"
        pytest.skip(f"needs {server.name}: make {server.relative_to(ROOT)}")


@contextlib.contextmanager
def s3_server(folder: Path, *, is_public: bool = False) -> Iterator[S3Server]:
    """A server for as long as the block lasts; a public one asks for no credentials."""
    need(S3_SERVER)
    server = S3Server(folder, is_public=is_public)
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def azure_server(folder: Path | None = None) -> Iterator[AzureServer]:
    """A server for as long as the block lasts; one that is to be started again needs a folder."""
    need(AZURE_SERVER)
    server = AzureServer(folder)
    try:
        yield server
    finally:
        server.kill()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
