"""Fixtures of object stores on real servers, one for all tests of a file; `conftest.py` has them.

What they need is imported once they are asked for: other tests run where it is not installed.
"""

from __future__ import annotations

import pytest

SERVERS = [pytest.param("shared_s3", id="s3"), pytest.param("azure", marks=pytest.mark.long)]
"""Fixtures of one server of each kind."""


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


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    """One of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def proxy(server):
    from support.proxy import proxy_to

    with proxy_to(server.port) as proxy:
        yield proxy


@pytest.fixture
def behind(server, proxy, monkeypatch):
    """`behind(name)`: a place behind the proxy, which nothing else uses."""
    from support.places import Spot

    for name, value in server.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    proxy.reset()
    yield lambda name: Spot(f"{server.url}/{name}", server.environment(proxy.port))
    proxy.reset()


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """A server of S3 that a test may kill, which the environment names."""
    from support.object_servers import s3_server

    yield from _named(monkeypatch, s3_server(tmp_path / "s3"))


@pytest.fixture
def own_azure(tmp_path, monkeypatch):
    """A server of Azure that a test may kill, which the environment names."""
    from support.object_servers import azure_server

    yield from _named(monkeypatch, azure_server(tmp_path / "azure"))


def _named(monkeypatch, made):
    """Yields a server, which the environment names meanwhile."""
    with made as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(params=["s3", pytest.param("own_azure", id="azure", marks=pytest.mark.long)])
def own_server(request):
    """One of each kind that a test may kill, which the environment names."""
    return request.getfixturevalue(request.param)
