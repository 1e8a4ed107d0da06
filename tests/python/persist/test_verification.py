"""Verification of checkpoints: by the parts that votes compare, and through recoveries, as tables of what happens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evermoe.checkpoint.checkpoint_folder import CheckpointFolder
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.retention import Retention
from evermoe.checkpoint.verification import Verification
from evermoe.checkpoint.verified_mark import superseded_of, verified_at
from evermoe.comm.group import Group
from evermoe.comm.task import Worker
from evermoe.state.rotation import Round

ROUNDS = {
    "all parts, from the first one on": ([(5, 4), (6, 4), "end"], 5),
    "in one vote": ([(5, 8), "end"], 5),
    "a part that some holder did not compare": ([(5, 4), "end"], None),
    "after such a turn, the next one": ([(5, 4), "end", (7, 4), (8, 4), "end"], 7),
    "the first part was not compared": ([(6, 4), "end"], None),
    "a turn that has not ended": ([(5, 8), "end", (7, 4)], 5),
    "two turns": ([(5, 8), "end", (7, 4), (9, 4), "end"], 7),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_a_turn_counts_from_the_step_of_its_first_part_if_all_was_compared(case):
    happened, expected = ROUNDS[case]
    turn, found = Round(8), None
    for each in happened:
        if each == "end":
            found = turn.end() or found
        else:
            turn.compared(*each)
    assert found == expected


HISTORIES = {
    "compared at its step or later": (["add 10", "through 10"], [10]),
    "compared before it": (["add 10", "through 9"], []),
    "two, of which one is older": (["add 10", "add 20", "through 15"], [10]),
    "three, of which one is kept, and the oldest": (["add 10", "add 15", "add 20", "through 30"], [10]),
    "at the end, of which one is kept": (["add 10", "add 15", "add 20", "end 20"], [10, 20]),
    "complete on disk only after the comparison": (["through 12", "add 10", "vote"], [10]),
    "nothing compared yet": (["add 10", "vote"], []),
    "a recovery that compared all state": (["add 10", "recovery", "equal", "resume 12"], [10]),
    "a recovery after a loss or a difference": (["add 10", "recovery", "resume 12", "through 20"], []),
    "one that began twice, and compared once": (
        ["add 10", "recovery", "recovery", "equal", "resume 12", "through 20"],
        [],
    ),
    "one after it": (["recovery", "resume 12", "add 20", "through 20"], [20]),
    "back to an older step": (["through 20", "recovery", "resume 12", "add 15", "vote", "through 14"], []),
    "under way while a copy differed": (["through 9", "doubt 12", "add 10", "through 20"], []),
    "after a copy differed": (["doubt 9", "add 10", "through 20"], [10]),
    "nothing is compared in votes": (["alone", "add 10", "through 10"], []),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_which_checkpoints_are_verified(tmp_path, case):
    """Each is a word and steps: what is added, compared or resumed from."""
    happened, expected = HISTORIES[case]
    store = CheckpointFolder(tmp_path, Owner("job", "layout"), "m")
    events = []
    found = Verification(store, Retention(1 if "of which one is kept" in case else 9), Group(), events.append)
    found.begin_recovery()
    found.resume([found.standing()], 0, 1)
    found.compare(is_comparing=True)
    for each in happened:
        word, _, number = each.partition(" ")
        step = int(number or 0)
        if word == "add":
            path = tmp_path / f"step-{step:08d}"
            path.mkdir()
            found.add(1 << 40 | step, path)
            assert store.awaited or not found._is_comparing or step <= found._doubted
        elif word in ("through", "vote"):
            found.advance(step or None, step + 3)
        elif word == "end":
            found.advance(step, step, is_last=True)
        elif word == "recovery":
            found.begin_recovery()
        elif word == "equal":
            found.compared()
        elif word == "doubt":
            found.doubt(step)
        elif word == "alone":
            found.compare(is_comparing=False)
        else:
            found.resume([found.standing(), [-1, 1, None, []]], step, 2)  # and a newcomer
    found.close()
    store.close()
    assert [event.step for event in events] == expected
    marked = {step: verified_at(tmp_path / f"step-{step:08d}", 1 << 40 | step) for step in (10, 15, 20)}
    assert [step for step, at in marked.items() if at is not None] == expected


def test_a_mark_that_the_first_member_did_not_live_to_write_is_written_in_the_recovery(tmp_path):
    store = CheckpointFolder(tmp_path, Owner("job", "layout"), "m")
    found = Verification(store, Retention(), Group(), lambda _: None)
    (path := tmp_path / "step-00000010").mkdir()
    found.compare(is_comparing=True)
    found.resume([found.standing()], 0, 1)
    found.add(1 << 40 | 10, path)
    found.advance(10, 13)
    found._last.wait()
    (path / "verified.json").unlink()
    found.begin_recovery()
    found.resume([found.standing()], 14, 2)
    found.close()
    store.close()
    assert verified_at(path, 1 << 40 | 10) == 13


def test_members_resume_with_what_those_of_the_latest_generation_know(tmp_path):
    """A member that was away knows of checkpoints on which the others have found a difference since."""
    store = CheckpointFolder(tmp_path, Owner("job", "layout"), "m")
    events = []
    newcomer = Verification(store, Retention(), Group(), events.append)
    away, member = [3, 0, 30, [[1 << 40 | 10, "step-00000010"]]], [4, 0, 20, [[1 << 40 | 20, "step-00000020"]]]
    newcomer.resume([newcomer.standing(), away, member], 25, 5)
    assert [(event.step, event.path) for event in events] == [(20, str(tmp_path / "step-00000020"))]
    assert newcomer.through == 25
    newcomer.close()
    store.close()


def test_a_verified_checkpoint_stays_until_its_mark_is_written(tmp_path):
    """A newer one may be published meanwhile, and supersede it."""
    store = CheckpointFolder(tmp_path, Owner("job", "layout"), "m")
    found = Verification(store, Retention(9), Group(), lambda event: None)
    found.compare(is_comparing=True)
    versions = [1 << 40 | step for step in (10, 11)]
    paths = [tmp_path / f"step-{step:08d}" for step in (10, 11)]
    found._worker = Worker("busy")
    may_write = threading.Event()
    found._worker.submit(lambda: may_write.wait() and None)
    for path, version in zip(paths, versions, strict=True):
        path.mkdir()
        found.add(version, path)
    found.advance(11, 12)
    found.doubt()
    assert store.awaited == {*versions}
    may_write.set()
    found.close()
    assert not store.awaited
    assert [verified_at(*each) for each in zip(paths, versions, strict=True)] == [12, 12]
    store.close()


@dataclass
class Kept:
    version: int
    path: Path = field(default_factory=Path)


RETAINED = {
    "without a verified one": ([], [], [1, 2]),
    "an older one": ([1], [], [2]),
    "two older ones": ([1, 2], [], [1]),
    "the newest": ([1, 4], [], [1, 2]),
    "one that awaits it": ([], [1], [2]),
    "both": ([1], [2], []),
}


@pytest.mark.parametrize("case", RETAINED)
def test_the_newest_verified_one_stays_and_one_that_may_be_verified(tmp_path, case):
    """Of the versions 1 to 4 a retention keeps the newest two in any case."""
    verified, awaited, expected = RETAINED[case]
    found = [Kept(version, tmp_path / f"step-{version}") for version in range(1, 5)]
    for each in found:
        each.path.mkdir()
        if each.version in verified:
            (each.path / "verified.json").write_text(f'{{"version": {each.version}, "step": 9}}')
    assert [each.version for each in superseded_of(found, Retention(2), awaited=awaited)] == expected


TEXTS = ["", "{", "[]", "1", '{"version": 2, "step": 3}', '{"version": 1}', '{"version": 1, "step": "3"}', "[" * 1000]


@pytest.mark.parametrize("text", TEXTS)
def test_a_damaged_mark_counts_for_nothing(tmp_path, text):
    (tmp_path / "verified.json").write_text(text)
    assert verified_at(tmp_path, 1) is None
