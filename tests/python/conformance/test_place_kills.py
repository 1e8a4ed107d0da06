"""Writers to an object store that are killed, cut off or answered with errors, by a proxy before a real server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from evermoe.checkpoint.checkpoint_store import find
from evermoe.checkpoint.manifest import as_bytes, read_manifest, read_units
from support.harness import SERVER
from support.places import Stop, Writer, all_whole, forget, is_whole, steps, write, write_as_process
from support.proxy import Fault, Request
from support.stores import contents, names

LIMIT = 60.0


def check_what_a_kill_leaves(spot):
    """Expect the previous or the next checkpoints, all complete; the next process leaves nothing of the killed one."""
    forget()
    found = all_whole(spot)
    assert found in ([2, 1], [3, 2, 1], [3, 2]), found
    later = Writer(spot, 5)
    assert later.store.newest_generation() in (3, 4)
    later.store._sweep(5)
    for step in (4, 5):
        later.write(step)
    assert all_whole(spot) == [5, 4]
    used = {path.name for path in find(spot.locate()).values()}
    left = {name.split("/")[0] for name in spot.files() if name.endswith(".safetensors")}
    assert left == used, left - used


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["hold", "hold after"])
def test_killed_at_any_change_the_checkpoints_of_before_are_there_and_nothing_is_torn(proxy, behind, kind):
    name = "before" if kind == "hold" else "before-after"
    before = behind(name)
    write(before, 1, 2)
    killed = 0
    for number in range(1, 100):
        spot = behind(f"{name}-{number}")
        before.copy_to(spot)
        if not proxy.kills(SERVER.Process(target=write_as_process, args=(spot, 4, 3)), number, kind):
            break
        killed += 1
        check_what_a_kill_leaves(spot)
        spot.clear()
    assert killed > 12


def every(number: int, fault: Fault, *, changes: bool) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.changes == changes and request.number % number == 0 else None


ROUGH = {
    "every second change answered 500": every(2, Fault("status", 500), changes=True),
    "every second read answered 503": every(2, Fault("status", 503), changes=False),
    "every third change cut before the server has it": every(3, Fault("cut"), changes=True),
    "every third change cut when the server has done it": every(3, Fault("cut after"), changes=True),
    "all delayed": lambda request: Fault("delay", 0.05),
}


@pytest.mark.parametrize("weather", ROUGH)
@pytest.mark.few(1)
def test_a_checkpoint_gets_there_through_errors_cuts_and_delays(proxy, behind, weather):
    spot = behind(f"rough-{list(ROUGH).index(weather)}")
    proxy.reset(ROUGH[weather])
    write(spot, 1, 2, 3)
    assert len(proxy.requests) > 30
    assert all_whole(spot) == [3, 2]


@pytest.mark.parametrize("kind", ["cut after", "status"])
def test_a_manifest_whose_answer_is_lost_is_known_to_be_there(proxy, behind, kind):
    """The server has made it, and refuses the second request for it."""
    spot = behind(f"lost-{kind.replace(' ', '-')}")
    told = []

    def once(request: Request) -> Fault | None:
        if request.method == "PUT" and request.path.endswith("/manifest.json") and not told:
            told.append(request)
            return Fault("cut after") if kind == "cut after" else Fault("status", 503)
        return None

    proxy.reset(once)
    (path,) = write(spot, 1)
    assert told and is_whole(path, 1)


def test_a_writer_that_is_refused_for_longer_than_its_patience_fails_and_changes_nothing(proxy, behind):
    spot = behind("refused")
    write(spot, 1)
    writer = Writer(spot, 4, patience=1.0)
    proxy.reset(lambda request: Fault("status", 503) if "safetensors" in request.path else None)
    with pytest.raises(Exception, match="503 Service Unavailable"):
        writer.write(2)
    proxy.reset()
    writer.write(3)
    assert all_whole(spot) == [3, 1]


@pytest.mark.long
def test_two_writers_that_decide_at_the_same_moment_agree(proxy, behind):
    """One publishes while the other gives the attempt up: either it is complete, or it never existed."""
    for number in range(6):
        spot = behind(f"race-{number}")
        writer, other = Writer(spot), Writer(spot, 4, "other")
        stop = Stop(writer.store)
        write_ = writer.begin(1)
        stop.wait()
        proxy.reset(lambda request: Fault("delay", 0.01 * (request.number % 3)))
        giving_up = SERVER.Process(target=sweep_as_process, args=(spot, 4))
        giving_up.start()
        stop.go_on()
        try:
            path = write_.wait_published()
        except Exception as error:
            assert "was given up" in str(error)
            path = None
        giving_up.join(LIMIT)
        assert giving_up.exitcode == 0
        forget()
        assert steps(spot) == ([] if path is None else [1])
        assert all_whole(spot) == steps(spot)
        other.close()


def test_the_files_of_a_checkpoint_that_goes_stay_for_one_that_is_just_being_published(proxy, behind):
    """It has seen them in use, and its manifest is on its way while the checkpoint that it shares them with goes."""
    spot = behind("late")
    writer, late = Writer(spot), Writer(spot, member="late")
    writer.write(1)
    stop = Stop(late.store)
    write_ = late.begin(2, contents(1))
    stop.wait()
    proxy.reset(
        lambda request: (
            Fault("hold") if request.method == "PUT" and re.search("step-00000002.*manifest", request.path) else None
        )
    )
    with ThreadPoolExecutor(1) as pool:
        stop.go_on()
        publishing = pool.submit(write_.wait_published)
        assert proxy.held.wait(LIMIT)
        writer.write(3)
        writer.write(4)
        assert steps(spot) == [4, 3]
        proxy.reset()
        path = publishing.result(LIMIT)
    found = dict(read_units(read_manifest(path), names()))
    assert all(torch.equal(as_bytes(found[name]), data) for name, data in contents(1).items())
    writer.write(5)
    writer.write(6)
    used = {path.name for path in find(spot.locate()).values()}
    assert {name.split("/")[0] for name in spot.files() if name.endswith(".safetensors")} == used


def sweep_as_process(spot, generation):
    os.environ |= spot.environment
    Writer(spot, generation, "sweeper").store._sweep(generation)
