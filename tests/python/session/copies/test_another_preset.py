"""A job that is started again with another preset, its memory intact."""

import signal

from support.history import check_history

STEPS, GATE = 12, 6


def test_the_preset_that_wrote_the_copies_is_named_and_another_follows_by_way_of_a_checkpoint(start_job, tmp_path):
    job = start_job(2, preset="moetion", checkpoints=str(tmp_path / "saved"))
    job.open_gate(GATE)
    killed = job.start_all({}, names="ab", steps=STEPS, gated=True)
    for each in killed:
        each.wait_for("gate", step=GATE)
    for each in killed:
        each.signal(signal.SIGKILL)
        each.join()
    refused = job.start_all({}, names="ab", steps=STEPS, session={"preset": "lazarus"})
    assert [each.join() for each in refused] == [1, 1]
    for each in refused:
        failed = each.events("failed")[0]
        assert failed["error"] == "LostExperts"
        assert "no usable copy is left of 1 unit (session)" in failed["message"]
        assert "Memory has session of steps" in failed["message"]
        assert "preset 'moetion' wrote them, and this run has another preset" in failed["message"]
        assert "Too many nodes failed" not in failed["message"]
    job.open_gate(GATE + 1)
    again = job.start_all({}, names="ab", steps=STEPS, gated=True)
    for each in again:
        each.wait_for("gate", step=GATE + 1)
        each.signal(signal.SIGTERM)
    job.open_gate(STEPS)
    assert [each.join() for each in again] == [143, 143]
    assert again[0].events("recovered")[0]["step"] >= GATE - 1
    check_history([*killed, *again])
    other = job.start_all({}, names="ab", steps=STEPS, session={"preset": "lazarus"})
    assert [each.join() for each in other] == [0, 0]
    assert other[0].events("recovered")[0]["step"] == GATE + 2
