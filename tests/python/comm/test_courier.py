"""The pacer and couriers: when messages may begin, by a clock that the tests set and by events."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evermoe.comm.courier import Courier, Message
from evermoe.comm.pacer import ANY_TIME, Pacer
from evermoe.comm.transport import Transport
from evermoe.planning.schedule import Link
from support.ranks import members, run_ranks, run_threads

PLACES = {(None, 0): (0, 2.0), ("reduce", 0): (1, 3.0), ("reduce", 1): (2, 1.0)}
PATIENCE = 20.0


class Clock:
    """A clock in nanoseconds that only the test moves."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        self.now += round(seconds * 1e9)


def paced():
    clock = Clock()
    pacer = Pacer(clock)
    pacer.expect_windows(PLACES)
    pacer.begin_step()
    return clock, pacer


def collective(pacer, clock, name="reduce", seconds=1.0):
    pacer._begins(name)
    clock.pass_seconds(seconds)
    pacer._ends(name)


def test_a_message_begins_only_if_it_ends_within_the_window():
    clock, pacer = paced()
    assert pacer.may_begin(0, 2.0)
    assert not pacer.may_begin(0, 2.1)
    clock.pass_seconds(1.0)
    assert pacer.may_begin(0, 1.0)
    assert not pacer.may_begin(0, 1.5)
    clock.pass_seconds(5.0)  # the collective is late: what the profile had promised is over
    assert not pacer.may_begin(0, 0.1)


def test_a_collective_closes_the_window_early_or_late():
    clock, pacer = paced()
    pacer._begins("reduce")
    assert not pacer.may_begin(None, 0.0)
    pacer._ends("reduce")
    assert pacer.may_begin(1, 3.0)
    assert pacer.wait_for_window(1, 3.0) == ("window", 1, clock.now)


class Stream:
    """A GPU's stream that reaches its marks when the test calls `reach`."""

    def __init__(self):
        self.marks = []

    def mark(self, notify):
        self.marks.append(notify)

    def wait_for_marks(self):
        pass

    def reach(self, at):
        self.marks.pop(0)(at)


def streamed():
    """Like `paced`, with a group whose collectives run on a stream."""
    clock, pacer = paced()
    group, stream, idle = SimpleNamespace(), Stream(), []
    pacer.on_idle = idle.append
    pacer.attach_group(group, stream)
    pacer.record_steps(9)
    pacer.begin_step()
    return clock, pacer, group, stream, idle


def test_a_collective_on_a_stream_lasts_until_the_stream_has_passed_it():
    clock, pacer, group, stream, idle = streamed()
    group.on_begin("reduce", True)
    group.on_end("reduce", True)
    assert pacer.may_begin(0, 2.0), "the stream has not reached it"
    stream.reach(clock.now)
    clock.pass_seconds(5.0)
    assert not pacer.may_begin(None, 0.0)
    stream.reach(clock.now)
    assert pacer.wait_for_window(1, 3.0) == ("window", 1, clock.now)
    assert idle == [False, True]
    pacer.begin_step()
    assert [each.busy for each in pacer.recorded_steps()] == [[("reduce", 0, 5_000_000_000)]]


def test_a_late_collective_of_a_stream_belongs_to_the_step_that_launched_it():
    _, pacer, group, stream, _ = streamed()
    for _ in range(2):
        group.on_begin("reduce", True)
        group.on_end("reduce", True)
    stream.reach(1)
    stream.reach(2)
    pacer.begin_step()
    stream.reach(3)
    stream.reach(4)
    assert pacer.may_begin(0, 2.0), "the first window is open, and not that after the second collective"
    assert not pacer.may_begin(2, 1.0)
    assert [each.busy for each in pacer.recorded_steps()] == [[("reduce", 1, 2), ("reduce", 3, 4)]]


def test_while_training_waits_for_messages_of_its_vote_other_messages_wait():
    clock, pacer = paced()
    pacer._begins("reduce")
    assert not pacer.may_begin(None, 9.0, for_vote=True)
    pacer.hurry(everything=False)
    assert pacer.wait_for_window(None, 9.0, for_vote=True) == ("vote", None, clock.now)
    assert not pacer.may_begin(None, 9.0)
    pacer._ends("reduce")
    pacer.begin_step()
    assert not pacer.may_begin(None, 9.0, for_vote=True), "those of the next step wait for windows again"


@pytest.mark.parametrize("waits", ["hurry", "busy"])
def test_training_that_waits_for_copies_delays_none(waits):
    _, pacer, group, stream, idle = streamed()
    group.on_begin("reduce", True)
    stream.reach(1)
    assert idle == [False]
    if waits == "hurry":
        pacer.hurry()
        assert idle == [False, True]
    else:
        with pacer.busy("copies"):
            assert idle == [False, True]
        assert idle == [False, True, False]
    group.on_end("reduce", True)
    stream.reach(2)
    assert idle[-1]


def test_messages_may_begin_later_than_planned_but_not_earlier():
    clock, pacer = paced()
    assert not pacer.may_begin(1, 0.5)
    collective(pacer, clock)
    assert pacer.may_begin(0, 0.5)
    assert pacer.may_begin(1, 0.5)
    assert not pacer.may_begin(2, 0.5)
    collective(pacer, clock, "another")  # opens no window that is known
    assert not pacer.may_begin(0, 0.5)
    collective(pacer, clock)
    assert pacer.may_begin(2, 1.0)
    assert not pacer.may_begin(2, 1.5)


def test_a_message_begins_at_the_time_of_the_check():
    """Its thread may read the clock again only after the end of the window."""
    clock, pacer = paced()
    clock.pass_seconds(1.0)
    times = iter([clock.now])
    pacer._now = lambda: next(times, clock.now + 10**10)
    assert pacer.wait_for_window(0, 1.0) == ("window", 0, clock.now)


def test_a_transfer_that_ended_before_the_step_does_not_count_for_it():
    clock, pacer = paced()
    clock.pass_seconds(1.0)
    pacer.begin_step()
    pacer.transfer_ends("reduce", clock.now - 1)
    assert pacer.may_begin(0, 2.0)
    assert not pacer.may_begin(1, 0.5)
    pacer.transfer_ends("reduce", clock.now)
    assert pacer.may_begin(1, 3.0)


def test_captures_pause_from_a_transfer_until_the_next_window_opens():
    clock, pacer = paced()
    said = []
    pacer.on_idle = said.append
    pacer.transfer_begins()
    assert said == [False]
    clock.pass_seconds(1.0)
    pacer.transfer_ends("reduce", clock.now)
    assert said == [False, True]
    pacer.transfer_begins()
    pacer.transfer_ends("a transfer without a window", clock.now)
    assert said == [False, True, False]
    pacer.hurry()
    assert said[2:] == [False, True], "training waits for copies"
    pacer.begin_step()
    pacer.expect_windows({})
    pacer.transfer_begins()
    assert said[2:] == [False, True], "no window is known"


def test_after_hurry_all_messages_begin_until_the_next_step():
    clock, pacer = paced()
    collective(pacer, clock)
    pacer._begins("reduce")
    pacer.hurry()
    assert pacer.wait_for_window(2, 100.0) == ("vote", None, clock.now)
    pacer.hurry("recovery")
    assert pacer.wait_for_window(2, 100.0).when == "recovery"
    pacer._ends("reduce")
    assert pacer.may_begin(2, 100.0)
    pacer.begin_step()
    assert not pacer.may_begin(1, 0.5)
    assert pacer.may_begin(0, 0.5)


def test_messages_begin_while_training_pauses(monkeypatch):
    """In an evaluation, a checkpoint or the script's own work between two steps no window opens."""
    clock, pacer = paced()
    collective(pacer, clock)
    pacer.begin_step()
    answers = []
    monkeypatch.setattr(pacer, "_until_paused", lambda now: min(0.01e9, Pacer._until_paused(pacer, now)))
    thread = threading.Thread(target=lambda: answers.append(pacer.wait_for_window(2, 0.5)))
    thread.start()
    clock.pass_seconds(9.5)
    assert not pacer.may_begin(2, 0.5)
    with pacer.busy("evaluation"):
        clock.pass_seconds(100.0)
        assert not pacer.may_begin(2, 0.5)
    assert not answers
    clock.pass_seconds(10.5)
    thread.join(PATIENCE)
    assert answers == [("idle", None, clock.now)]


def test_messages_of_later_steps_wait_for_their_steps():
    clock, pacer = paced()
    now = pacer.step
    collective(pacer, clock)
    assert pacer.may_begin(1, 1.0, now)
    assert not pacer.may_begin(0, 1.0, now + 1)
    assert pacer.may_begin(ANY_TIME, 100.0, now)
    assert not pacer.may_begin(ANY_TIME, 100.0, now + 1)
    pacer.begin_step()
    assert pacer.may_begin(0, 1.0, now + 1)
    assert not pacer.may_begin(1, 1.0, now + 1)
    assert pacer.may_begin(1, 1.0, now), "it is late"
    assert pacer.wait_for_window(ANY_TIME, 100.0)[:2] == ("background", None)


def test_without_a_profile_any_idle_time_is_a_window():
    pacer = Pacer(Clock())
    pacer.begin_step()
    assert pacer.may_begin(None, 1e9)
    with pacer.busy("reduce"):
        assert not pacer.may_begin(None, 0.0)
    assert pacer.wait_for_window(None, 1e9)[:2] == ("idle", None)


def test_uncounted_collectives_open_no_window_and_are_not_recorded():
    clock, pacer = paced()
    pacer.record_steps(2, left_out=1)
    for _ in range(4):
        pacer.begin_step()
        with pacer.uncounted():
            collective(pacer, clock, "another")
        assert pacer.may_begin(0, 0.5), "the window that was open still is"
        assert not pacer.may_begin(1, 0.5)
        collective(pacer, clock)
        assert pacer.may_begin(1, 3.0)
    assert [[name for name, _, _ in step.busy] for step in pacer.recorded_steps()] == [["reduce"], ["reduce"]]
    assert pacer.recorded_steps()[0].start > 0


def test_collectives_between_two_steps_are_not_counted():
    clock, pacer = paced()
    collective(pacer, clock)
    pacer.begin_forward()
    assert pacer.may_begin(0, 2.0)
    assert not pacer.may_begin(1, 0.5)
    collective(pacer, clock)
    assert pacer.may_begin(1, 3.0)
    clock, pacer = paced()
    clock.pass_seconds(1.5)
    pacer.begin_forward()  # nothing came in between: the window stays open
    assert not pacer.may_begin(0, 1.0)


def test_the_latest_complete_steps_are_recorded():
    clock, pacer = paced()
    pacer.record_steps(2)
    collective(pacer, clock)  # of a step that has begun before
    for number in range(4):
        pacer.begin_step()
        clock.pass_seconds(1.0)
        collective(pacer, clock, f"reduce {number}")
    steps = pacer.recorded_steps()
    second = 10**9
    assert [step.end - step.start for step in steps] == [2 * second, 2 * second]
    assert [step.busy for step in steps] == [
        [(f"reduce {number}", step.start + second, step.start + 2 * second)] for number, step in enumerate(steps, 1)
    ]


def test_a_waiting_thread_is_woken_when_its_window_opens():
    clock, pacer = paced()
    asked, answers = threading.Event(), []
    inner = pacer._may_begin

    def may_begin(*arguments):
        asked.set()
        return inner(*arguments)

    pacer._may_begin = may_begin
    thread = threading.Thread(target=lambda: answers.append(pacer.wait_for_window(2, 0.5)))
    thread.start()
    assert asked.wait(PATIENCE)
    for _ in range(2):
        assert not answers
        collective(pacer, clock)
    thread.join(PATIENCE)
    assert answers == [("window", 2, clock.now)]


def test_a_waiting_thread_sleeps_through_collectives_that_open_no_window_for_it():
    clock, pacer = paced()
    collective(pacer, clock)
    wakes, wait = [], pacer._change.wait
    pacer._change.wait = lambda seconds: wakes.append(seconds) or wait(seconds)
    thread = threading.Thread(target=lambda: pacer.wait_for_window(2, 0.5, pacer.step + 1))
    thread.start()
    while not wakes:
        time.sleep(0.001)
    pacer.begin_step()
    for _ in range(20):
        collective(pacer, clock, "another")
    collective(pacer, clock)
    time.sleep(0.05)
    collective(pacer, clock)
    thread.join(PATIENCE)
    assert not thread.is_alive() and wakes == [pytest.approx(10.0, abs=0.1)]


def paced_transfer(group, folder):
    """Rank 0 sends three messages to rank 1; the test opens their windows one by one."""
    group, transport = members(group, folder, PATIENCE)
    clock = Clock()
    pacer = Pacer(clock)
    pacer.expect_windows(PLACES)
    courier = Courier(transport, pacer, "courier", link=Link(0.5, 8.0))  # one byte takes 0.625 s
    box = torch.arange(3, dtype=torch.uint8) if group.rank == 0 else torch.zeros(3, dtype=torch.uint8)
    messages = [Message(box[i : i + 1], 1 - group.rank, 5, i) for i in range(3)]
    if group.rank == 1:
        task = courier.submit(lambda: [courier.wait_received(courier.begin_receive(message)) for message in messages])
        assert courier.wait_for_task(task, group)
        courier.close()
        return box
    waits, asked, inner = [], threading.Semaphore(0), pacer.wait_for_window

    def wait(window, seconds, step, **options):
        waits.append((window, seconds, len(courier.sent)))
        asked.release()
        return inner(window, seconds, step, **options)

    pacer.wait_for_window = wait
    task = courier.submit(lambda: courier.send_messages(iter(messages)))
    for open_window in (pacer.begin_step, *2 * [lambda: collective(pacer, clock)]):
        assert asked.acquire(timeout=PATIENCE)
        open_window()
    assert courier.wait_for_task(task, group)
    assert task.result == 3
    # Before it waits for a window, all earlier messages have been sent and noted.
    assert waits == [(0, 0.625, 0), (1, 0.625, 1), (2, 0.625, 2)]
    assert [(each.nbytes, each.peer, each.window) for each in courier.sent] == [(1, 1, 0), (1, 1, 1), (1, 1, 2)]
    assert [each.start for each in courier.sent] == [0, 10**9, 2 * 10**9]
    courier.close()
    return box


def test_couriers_send_each_message_in_its_window(tmp_path):
    found = run_threads(tmp_path, 2, paced_transfer, str(tmp_path))
    assert [box.tolist() for box in found] == [[0, 1, 2]] * 2


def silent_peer(group, folder):
    """Rank 1 never sends: return the failure of rank 0 and its reason."""
    mine, transport = members(group, folder, 0.5)
    if mine.rank == 1:
        group.all_reduce(torch.zeros(1))  # it lives, until rank 0 has given up
        return ""
    courier = Courier(transport, None, "courier")
    box = torch.zeros(1, dtype=torch.uint8)
    task = courier.submit(lambda: courier.wait_received(courier.begin_receive(Message(box, 1, 5))))
    assert not courier.wait_for_task(task, mine)
    assert task.lost
    courier.close()
    group.all_reduce(torch.zeros(1))
    return mine.broken


def test_a_wait_for_a_silent_peer_fails_after_the_limit(tmp_path):
    assert run_threads(tmp_path, 2, silent_peer, str(tmp_path)) == ["copies have stopped: a peer is silent", ""]


def partly_sent(group, folder):
    """Stop rank 1 in the middle of a message and drop the groups of both; return each failure and its reason."""
    mine, transport = members(group, folder, 10 * PATIENCE)
    box = torch.full((1 << 28,), 1 - mine.rank, dtype=torch.uint8)
    courier, message = Courier(transport, None, "courier"), Message(box, 1 - mine.rank, 5)
    if mine.rank == 1:
        group.all_gather(torch.tensor([os.getpid()]))
        task = courier.submit(lambda: courier.wait_received(courier.begin_receive(message)))
        while not box[0]:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)  # until the sender has given up
    else:
        pid = int(group.all_gather(torch.tensor([0]))[1])
        task = courier.submit(lambda: courier.send_messages([message]))
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
    mine.drop("a test")
    assert not courier.wait_for_task(task, mine)
    if mine.rank == 0:
        os.kill(pid, signal.SIGCONT)
    courier.close()
    return task.lost, bool(box[-1])


def test_a_message_that_arrived_in_part_fails(tmp_path):
    sent, received = run_ranks(tmp_path, 2, partly_sent, str(tmp_path))
    assert sent == ("send among 2 members failed: a test", True)
    reasons = ["a test", "rank 0: it has closed its connections"]  # whichever it sees first when it continues
    assert received in [(f"receive among 2 members failed: {reason}", False) for reason in reasons]


@pytest.mark.gpu
def test_tasks_read_work_launched_before_them_and_do_not_wait_for_later_work():
    values = torch.zeros(1 << 20, device="cuda")
    courier = Courier(Transport("127.0.0.1"), None, "courier", device=values.device)
    torch.cuda._sleep(100_000_000)
    values += 1
    task = courier.submit(values.cpu)
    torch.cuda._sleep(2_000_000_000)
    later = torch.cuda.current_stream().record_event()
    assert task.wait()
    assert not later.query()
    assert task.result is not None
    assert bool((task.result == 1).all())
    courier.close()


def test_silence_counts_from_the_last_completed_transfer(monkeypatch):
    """Members that wait for the same peer in a collective time out then, and continue without a late member."""
    clock, limit = [0.0], 8.0
    group = SimpleNamespace(limit_seconds=limit, broken=None)
    monkeypatch.setattr("evermoe.comm.courier.time", SimpleNamespace(monotonic=lambda: clock[0]))
    courier = Courier(group, None, "courier")
    dropped = []

    def drop(reason):
        dropped.append((reason, clock[0]))
        group.broken = reason

    waiting = SimpleNamespace(drop=drop, timed_out=False, on_wait=lambda begins, has_succeeded=True: None)

    def is_over_within(seconds):
        if clock[0] < 1.0:
            courier.progress += 1
        clock[0] += seconds
        return False

    courier.wait_for_task(SimpleNamespace(is_over_within=is_over_within, wait=lambda: False), waiting)
    courier.close()
    ((reason, at),) = dropped
    assert reason == "copies have stopped: a peer is silent"
    assert limit <= at <= 1.25 * limit
