"""Fixtures of object stores on real servers, one for all tests of a file; `conftest.py` has them.

What they need is imported once they are asked for: other tests run where it is not installed.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shared_s3(tmp_path_factory):
    from support.object_servers import s3_server

    with s3_server(tmp_path_factory.mktemp("servers") / "s3") as server:
        yield server


@pytest.fixture(scope="module")
def azure():
    from support.object_servers import azure_server

    with azure_server() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(shared_s3):
    from support.proxy import proxy_to

    with proxy_to(shared_s3.port) as proxy:
        yield proxy


@pytest.fixture
def behind(shared_s3, proxy, monkeypatch):
    """`behind(name)`: a place behind the proxy, in a bucket of its own."""
    from support.places import Spot

    for name, value in shared_s3.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    proxy.reset()

    def make(name):
        (shared_s3.folder / name).mkdir(exist_ok=True)
        return Spot(f"s3://{name}/run", shared_s3.environment(proxy.port))

    yield make
    proxy.reset()
