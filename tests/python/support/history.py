"""Properties that the records of all workers must have, whatever failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from evermoe.data.sampler import ElasticSampler
from support import worker
from support.harness import Event, Worker


def check_history(
    workers: Iterable[Worker], away: Collection[str] = (), undone: bool = False, repaired: Collection[str] = ()
) -> None:
    """No committed step skipped or repeated, equal bits at equal versions, every sample used once.

    `away`: workers that were out of the job for a while, so that they skip steps of the others.
    `undone`: steps may be repeated, because the job had to go back.
    `repaired`: workers with bits that have flipped, which they keep until a recovery.
    """
    workers = list(workers)
    known: dict[int, dict[str, int]] = defaultdict(dict)
    for each in workers:
        if not undone:
            _check_positions(each, each.name in away)
        is_flipped = False
        for event in each.events():
            is_flipped = event["event"] != "recovered" and (is_flipped or event["event"] == "flipped")
            if each.name in repaired and (is_flipped or event["event"] == "kept"):
                continue
            for unit, value in event.get("digests", {}).items():
                first = known[event["version"]].setdefault(unit, value)
                where = f"{unit} of version {event['version']:x} in {each.name}'s {event['event']}"
                assert first == value, f"{where} differs"
    _check_shares(workers)


def _check_positions(each: Worker, away: bool) -> None:
    position: int | None = None
    unreported = begun = 0
    resumed: set[int] = set()  # steps at which it came back to the job since the last that was reported to it
    for event in each.events():
        if event["event"] == "share":
            begun = event["step"]
        elif event["event"] == "recovered":
            assert event["steps_lost"] == 0
            assert position is None or unreported <= event["step"], (each.name, unreported, event)
            # Not past the step that it had begun, which may be several after the last that was reported to it.
            assert position is None or away or event["step"] <= begun + 1, (each.name, begun, event)
            unreported = event["step"] if position is None else unreported
            position = event["step"]
            resumed |= {position} if away else set()
        elif event["event"] == "commit":
            # Where the copies were made during the next step, its vote reports the previous steps, too.
            assert event["step"] in {unreported, position, *resumed}, (each.name, position, event)
            position, unreported = max(position, event["step"] + 1), event["step"] + 1
            resumed.clear()
        elif event["event"] == "done":
            assert event["step"] == position == each.options.steps
            assert event["consumed"] == position * each.options.batch_size


def _check_shares(workers: list[Worker]) -> None:
    """The members of a group that commits a step have its batch between them.

    A group's generation may be that of another one before a crash of all processes, if that one has left nothing
    behind: so what was begun before a process of the group had started is not the group's.
    """
    attempts: dict[tuple[int, int], dict[str, Event]] = defaultdict(dict)
    committed = set()
    for each in workers:
        for event in each.events("share"):
            attempts[event["step"], event["generation"]][f"{each.name}.{each.pid}"] = event
        committed |= {(e["step"], e["generation"], each.events()[0]["time"]) for e in each.events("commit")}
    sampler = ElasticSampler(worker.SAMPLES, workers[0].options.batch_size)
    for step, generation, since in sorted(committed):
        sampler.consumed = step * sampler.batch_size
        shares = [event["indices"] for event in attempts[step, generation].values() if event["time"] >= since]
        used = sorted(index for indices in shares for index in indices)
        assert used == sorted(sampler.batch().tolist()), f"step {step} of generation {generation}"


def committed_steps(workers: Iterable[Worker]) -> int:
    """Return how many steps any of them has seen committed."""
    return max((event["step"] + 1 for each in workers for event in each.events("commit")), default=0)


def states_by_version(workers: Iterable[Worker]) -> dict[int, dict[str, int]]:
    """Digests of all units by version, as recorded after updates, so before anything was recovered.

    Of a version that members have by a vote that they recall, as they learnt of a loss before they had its result:
    those of what they keep when a recovery begins.
    """
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for each in workers:
        for event in each.events("copy", after="update"):
            found[event["version"]] |= event["digests"]
    for each in workers:
        for event in each.events("kept"):
            found[event["version"]] = event["digests"] | found[event["version"]]
    return found


def check_recovered(workers: Iterable[Worker], survivor: Worker, index: int = -1) -> Event:
    """A recovery of `survivor` brought back a state that was recorded before it, bit for bit."""
    workers = list(workers)
    recovered = survivor.events("recovered")[index]
    copy = [e for e in survivor.events("copy", after="phase") if e["time"] <= recovered["time"]][-1]
    before = states_by_version(workers)[copy["version"]]
    units = {unit for each in workers for e in each.events("copy") for unit in e["digests"]}
    assert before.keys() == units, f"version {copy['version']:x} was never complete"
    assert {unit: before[unit] for unit in copy["digests"]} == copy["digests"]
    return recovered
