"""Real servers of object stores on this machine, each with a folder of its own, to be killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness import wait_until

ROOT = Path(__file__).parents[3]
S3_SERVER = ROOT / "target" / "tools" / "bin" / "s3s-fs"
KEY, SECRET = "evermoe", "not-to-be-logged"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class S3Server:
    """s3s-fs, whose buckets are folders below its own."""

    def __init__(self, folder: Path, bucket: str = "bucket") -> None:
        self.folder, self.bucket, self.port = folder, bucket, free_port()
        (folder / bucket).mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [S3_SERVER, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--access-key", KEY, "--secret-key", SECRET, self.folder]
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
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
        }


def need_s3() -> None:
    """Skips a test where the server is not built; in CI it must be."""
    if not S3_SERVER.exists():
        assert "CI" not in os.environ, f"{S3_SERVER} is missing: make {S3_SERVER.relative_to(ROOT)}"
        pytest.skip("needs s3s-fs: make target/tools/bin/s3s-fs")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server for as long as the block lasts."""
    need_s3()
    server = S3Server(folder)
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
