"""URLs of places: what they name, what is refused and how, what HTTP reads, and how much is under way at a time."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import evermoe
from evermoe import ElasticSampler, Session, load_weights
from evermoe.checkpoint.checkpoint_store import find
from evermoe.checkpoint.object_store import locate, locate_below
from evermoe.config.environment import free_port
from evermoe.errors import CorruptCopy
from evermoe.events import Checkpoint, Recovered
from support.harness import SERVER
from support.models import make
from support.object_servers import SECRET, s3_server
from support.places import Spot, all_whole, write
from support.proxy import Fault, proxy_to
from support.worker import SAMPLES, Model, dataset


@pytest.fixture
def keys(shared_s3, monkeypatch):
    for name, value in shared_s3.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("servers") / "public", is_public=True) as server:
        yield server


# ---- URLs


def test_paths_and_file_urls_are_folders(tmp_path):
    assert locate(tmp_path) == locate(str(tmp_path)) == locate(f"file://{tmp_path}") == tmp_path
    assert locate("file:///a%20b") == Path("/a b")
    assert locate("runs/a:b") == Path("runs/a:b")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("ftp://host/run", "the scheme ftp:// is unknown; expected s3://"),
        ("s3:///run", "names no bucket"),
        ("s3://key:hidden@bucket/run", "credentials come from the environment"),
        ("https://host/run?signature=hidden", "credentials come from the environment"),
        ("file://host/run", "on this machine"),
        (Path("s3://bucket/run"), "expected a URL as a string, got a path"),
    ],
)
def test_a_url_of_no_store_is_refused_and_no_credential_is_shown(where, message):
    with pytest.raises(ValueError, match=message) as told:
        locate(where)
    assert "hidden" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "variable"),
    [("s3://bucket/run", "AWS_METADATA_ENDPOINT"), ("az://bucket/run", "AZURE_MSI_ENDPOINT")],
)
def test_missing_credentials_are_an_error_at_once(monkeypatch, url, variable):
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(PermissionError, match="there are no credentials: set A"):
        locate(url)


def test_wrong_credentials_are_a_permission_error_without_them(keys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(PermissionError, match="the credentials may not do this") as told:
        locate("s3://bucket/denied").place.put("a", b"x")
    assert SECRET not in str(told.value) and "another-secret" not in str(told.value)


def test_a_service_that_is_away_is_a_connection_error_after_the_patience(keys, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for act in (lambda place: place.put("a", b""), lambda place: place.create("a", b""), lambda place: place.names()):
        with pytest.raises(ConnectionError, match=r"s3://bucket/away"):
            act(locate("s3://bucket/away", patience=0.5).place)


# ---- objects


def test_an_object_is_made_once_and_its_maker_is_known(keys):
    place = locate("s3://bucket/once").place
    assert [place.create("a", data) for data in (b"1", b"2", b"1")] == [True, False, True]
    place.put("a", b"3")
    assert (place.read("a", 9), place.read("b", 9), place.size("a"), place.size("b")) == (b"3", None, 1, None)
    with pytest.raises(CorruptCopy, match="at most 0 bytes"):
        place.read("a", 0)


@pytest.mark.parametrize("nbytes", [0, 1, 8 << 20, (8 << 20) + 1, 20 << 20])
def test_bytes_come_back_as_they_went_in_parts(keys, nbytes):
    place, data = locate("s3://bucket/parts").place, np.random.default_rng(nbytes).bytes(nbytes)
    place.put("deep/er/object", data)
    assert [(name, size) for name, size, _ in place.below("deep")] == [("deep/er/object", nbytes)]
    found = np.zeros(max(0, nbytes - 1), np.uint8)
    place.read_into("deep/er/object", 1, found)
    assert found.tobytes() == data[1:]
    with pytest.raises(OSError, match="parts/deep/er/object"):
        place.read_into("deep/er/object", 1, np.zeros(nbytes + 1, np.uint8))
    place.remove(["deep/er/object", "no/such"])
    assert place.names() == []


def test_writes_take_as_long_as_the_limit_on_bytes_says(keys):
    place = locate("s3://bucket/slow", upload_limit=1e6).place
    began = time.monotonic()
    for number in range(3):
        place.put(str(number), bytes(250_000))
    assert time.monotonic() - began >= 0.5  # the third one waits for the first two


def test_reads_take_as_long_as_the_limit_on_bytes_says_and_lose_no_patience_by_it(shared_s3, keys, monkeypatch):
    """The last parts wait longer for their turn than requests are tried again, and then meet a fault."""
    data = np.random.default_rng(1).bytes(24 << 20)
    locate("s3://bucket/thick").place.put("a", data)
    with proxy_to(shared_s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        place = locate("s3://bucket/thick", patience=3.0, download_limit=4 << 20).place
        assert place.read("a", len(data)) == data, "no limit on what is read at once"
        cut = [3, 4]
        proxy.reset(lambda request: Fault("cut") if request.number in cut else None)
        found, began = np.zeros(len(data), np.uint8), time.monotonic()
        place.read_into("a", 0, found)
        assert time.monotonic() - began >= 4.0  # the third of three parts waits for two of 2 s
        assert found.tobytes() == data
        assert len(proxy.requests) > 4
    with pytest.raises(ValueError, match="download_limit: expected 1 byte per second or more, got 0"):
        locate("s3://bucket/thick", download_limit=0.5)


def in_child(url, environment, folder):
    os.environ |= environment
    locate(url).place.put("child", b"1")
    Path(folder, "done").touch()


def test_a_child_that_was_forked_has_places_of_its_own(shared_s3, keys, tmp_path):
    locate("s3://bucket/fork").place.put("parent", b"1")
    child = os.fork()
    if child == 0:
        try:
            in_child("s3://bucket/fork", {}, tmp_path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "done").exists()
    other = SERVER.Process(target=in_child, args=("s3://bucket/fork", shared_s3.environment(), tmp_path))
    other.start()
    other.join(40)
    assert other.exitcode == 0


# ---- HTTP


@pytest.fixture
def published(public, monkeypatch):
    """The URL by which anybody may read what a job has written by another one."""
    for name, value in public.environment().items():
        monkeypatch.setenv(name, value)
    if not (public.folder / "bucket" / "run").exists():
        write(Spot("s3://bucket/run"), 1, 2)
    for name in public.environment():
        monkeypatch.delenv(name)
    return f"http://127.0.0.1:{public.port}/bucket/run"


def test_checkpoints_are_read_by_http_without_credentials(published):
    assert all_whole(Spot(published)) == [2, 1]
    newest = find(locate(published))[3 << 40 | 2]
    assert find(locate(str(newest))) == {3 << 40 | 2: newest}
    with pytest.warns(UserWarning, match="is ignored: .* belongs to another model"):
        assert find(locate(str(newest)), "another layout") == {}
    model, _, _ = make("sgd-momentum")
    with torch.no_grad():
        model.head.weight.zero_()
    load_weights(model, str(newest))
    assert model.head.weight.count_nonzero()


def test_nothing_is_written_by_http(published):
    place = locate(published).place
    for act in (lambda: place.put("a", b""), lambda: place.create("a", b""), lambda: place.remove(["a"])):
        with pytest.raises(OSError, match="is read-only: write to s3://"):
            act()
    with pytest.raises(FileNotFoundError, match=r"has no index.json, and HTTP cannot list files"):
        find(locate(f"{published}/nothing"))
    with pytest.raises(CorruptCopy, match="the file is missing"):
        load_weights(make("sgd")[0], str(locate_below(f"{published}/step-00000009")))


def test_a_session_starts_from_http_and_writes_nothing(public, monkeypatch, tmp_path):
    (tmp_path / "memory").mkdir()

    def train(where, until, interval=0):
        model, events = Model(), []
        session = Session(
            model,
            torch.optim.AdamW(model.parameters(), fused=True),
            ElasticSampler(SAMPLES, 4),
            membership=evermoe.Membership(job=f"until-{until}", memory_dir=str(tmp_path / "memory")),
            checkpoints=evermoe.Checkpoints(where, interval=interval),
            on_event=events.append,
        )
        for step in session.steps(until):
            with step:
                step.backward(model(dataset()[step.indices]))
        return events

    with monkeypatch.context() as writing:
        for name, value in public.environment().items():
            writing.setenv(name, value)
        train("s3://bucket/trained", 3)
    url = f"http://127.0.0.1:{public.port}/bucket/trained"
    events = train(url, 5)
    assert [event.step for event in events if isinstance(event, Recovered)] == [3]
    assert not [event for event in events if isinstance(event, Checkpoint)]
    with pytest.raises(ValueError, match=r"checkpoints: interval is 2 steps, but http://.* is read-only"):
        train(url, 6, interval=2)


def test_pec_needs_a_place_to_write_to():
    with pytest.raises(
        ValueError, match=r"expected checkpoints to be a folder that all members share, s3://.* got https://host/pec"
    ):
        Session(Model(), None, None, preset="pec", checkpoints="https://host/pec")
