"""The ledger of tokens at risk and lost: what a recovery costs, also after another one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe.copies.copy_selection import CopySelection
from evermoe.copies.loss_ledger import LossLedger
from evermoe.copies.protection import Protection
from evermoe.presets import Pec
from evermoe.state.copy_marks import SAVED
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import version_of
from support.ranks import alone, run_threads

FIRST, SECOND = expert_unit("experts", 0), expert_unit("experts", 1)


@pytest.fixture
def ledger():
    return make_ledger()


def make_ledger(has_marks=True, experts=2, **options):
    layer = MoE(8, 8, experts, top_k=1)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1), has_marks=has_marks)
    found = LossLedger(state, Pec(**options))

    def take(step, *tokens):
        layer.experts.count.reset()
        layer.experts.count.add(np.array(tokens), is_counted=True)
        found.add_step(step)

    found.layer, found.take = layer, take
    return found


def at(step, generation=1):
    return version_of(generation, step)


def recover(ledger, step, since):
    lost = ledger.count_lost({unit: at(found) for unit, found in since.items()})
    ledger.record_recovery(step, lost)
    return lost


def test_copies_of_a_recovery_are_known_to_the_next_one(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {}) == {}
    ledger.record_copies([FIRST, SECOND], at(2))
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}


def test_a_copy_that_never_came_to_be_leaves_its_tokens_at_risk(ledger):
    ledger.take(1, 5, 50)
    ledger.record_copies([FIRST, SECOND], at(1))
    ledger.take(2, 7, 70)
    ledger.record_copies([FIRST], at(2))
    ledger.take(3, 3, 30)
    assert ledger.selection.at_risk.tolist() == [[3, 100]]
    for _ in range(2):  # what is reported twice counts once
        ledger.drop_copies([FIRST], at(2))
        assert ledger.selection.at_risk.tolist() == [[10, 100]]
    assert recover(ledger, 3, {FIRST: 1}) == {FIRST: 10}


def test_a_copy_that_never_came_to_be_before_one_that_did_changes_nothing(ledger):
    for step in (1, 2, 3):
        ledger.take(step, 5, 50)
        ledger.record_copies([FIRST], at(step))
    ledger.take(4, 1, 10)
    ledger.drop_copies([FIRST], at(2))
    assert ledger.selection.at_risk.tolist() == [[1, 160]]
    ledger.drop_copies([FIRST], at(3))
    assert ledger.selection.at_risk.tolist() == [[11, 160]]


def test_copies_of_both_kinds_after_a_step_pass_over_the_others_once():
    """The first replica repeats the step, the second gets the state before it, and the third expert has none."""
    ledger = make_ledger(experts=3)
    selected = SimpleNamespace(now={FIRST, SECOND, "dense"}, _behind={SECOND}, _ledger=ledger)
    selected.record_step = partial(CopySelection.record_step, selected)
    first = SimpleNamespace(version=None)
    protection = SimpleNamespace(ledger=ledger, keepers=[], first=first, selection=selected, _step_began=0.0)
    ledger.take(1, 5, 50, 500)
    ledger.layer.experts.count.reset()
    ledger.layer.experts.count.add(np.array([7, 70, 0]), is_counted=True)
    Protection.commit_step(protection, at(2), None)
    assert ledger.selection.checkpoint == 1
    assert ledger.selection.at_risk.tolist() == [[0, 70, 500]]
    assert ledger.selection.waiting.tolist() == [[0, 0, 1]]
    assert ledger.count_lost({FIRST: at(2), SECOND: at(1)}) == {FIRST: 0, SECOND: 70}


def test_state_of_a_recovery_is_known_without_copies(ledger):
    ledger.take(1, 5, 50)
    recover(ledger, 1, {})
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {SECOND: 1}) == {SECOND: 70}


def test_the_same_copy_costs_only_what_came_since_it_was_last_gone_back_to(ledger):
    ledger.record_copies([FIRST, SECOND], at(0))
    ledger.take(1, 5, 50)
    assert recover(ledger, 1, {FIRST: 0}) == {FIRST: 5}
    ledger.take(2, 7, 70)
    assert recover(ledger, 2, {FIRST: 0, SECOND: 0}) == {FIRST: 7, SECOND: 120}
    ledger.record_copies([FIRST], at(2))
    ledger.take(3, 3, 30)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 3}
    assert ledger.lost_LE.tolist() == [[15, 120]]
    assert ledger.plt == pytest.approx(135 / 165)


def test_an_expert_that_lost_tokens_counts_a_tenth_more_until_it_has_got_as_many_again(ledger):
    ledger.take(1, 5, 50)
    ledger.record_copies([FIRST, SECOND], at(1))
    ledger.take(2, 7, 70)
    assert ledger.boost_factors() == {}
    assert recover(ledger, 2, {FIRST: 1}) == {FIRST: 7}
    for step, tokens in ((3, 6), (4, 0)):
        ledger.take(step, tokens, 100)
        assert ledger.boost_factors() == {"experts": [1.1, 1.0]}, "6 of 7 tokens have come again"
    ledger.take(5, 1, 0)
    assert ledger.boost_factors() == {}


def test_copies_of_steps_that_were_undone_are_forgotten(ledger):
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    ledger.record_copies([FIRST], at(2))
    ledger.total_LE[:] = [[5, 50]]  # as with the state of step 1
    recover(ledger, 1, {})
    ledger.take(2, 1, 10)
    ledger.record_copies([FIRST], at(2))
    ledger.take(3, 2, 20)
    assert recover(ledger, 3, {FIRST: 2}) == {FIRST: 2}


def count_after_a_recovery_that_failed(group):
    """Rank 1 has counted the loss in it, rank 0 has not."""
    ledger, before = make_ledger(), version_of(1, 2)
    ledger.take(1, 5, 50)
    ledger.take(2, 7, 70)
    if group.rank == 1:
        assert recover(ledger, 2, {FIRST: 0}) == {FIRST: 12}
        before = version_of(2, 2)
    ledger.lost_LE[:] = [[12, 0]]  # as with the state of rank 1, which is newer
    protection = SimpleNamespace(
        options=SimpleNamespace(lagging="always"),
        state=SimpleNamespace(layers=[""]),
        ledger=ledger,
        _membership=SimpleNamespace(everyone=group),
    )
    lost = Protection.count_losses(protection, {FIRST: version_of(1, 0)}, version_of(1, 2), before)
    return {"lost": lost, "ledger": ledger.to_fields()}


def test_all_continue_with_the_ledger_of_the_member_that_knows_most(tmp_path):
    first, second = run_threads(tmp_path, 2, count_after_a_recovery_that_failed)
    assert first == second
    assert first["lost"] == {FIRST: 0}


# ---- two levels


def test_what_a_local_copy_has_is_not_lost_and_still_not_saved(ledger):
    ledger.take(1, 90, 10)
    ledger.record_local_copies([FIRST], at(1))
    ledger.take(2, 10, 10)
    assert recover(ledger, 2, {FIRST: 1}) == {FIRST: 10}
    for kind in (ledger.selection, ledger.local):
        assert kind.lost.tolist() == ledger.lost_LE.tolist() == [[10, 0]]
        assert kind.plt == ledger.plt
    assert (ledger.selection.at_risk.tolist(), ledger.local.at_risk.tolist()) == ([[90, 20]], [[0, 20]])
    ledger.load_fields(ledger.to_fields())  # as every member does in the next recovery


def test_what_a_saved_copy_lacks_is_lost_although_there_was_a_local_one(ledger):
    ledger.record_copies([FIRST, SECOND], at(0))
    ledger.take(1, 90, 10)
    ledger.record_local_copies([FIRST, SECOND], at(1))
    assert recover(ledger, 1, {FIRST: 0}) == {FIRST: 90}
    assert ledger.local.lost.tolist() == ledger.selection.lost.tolist() == [[90, 0]]


@pytest.mark.parametrize("level", ["selection", "local"])
def test_k_of_both_levels_doubles_whenever_the_limit_is_passed(level):
    ledger = make_ledger(max_lost_token_fraction=0.05, experts_per_save=1, experts_per_snapshot=1)
    ledger.take(1, 90, 10)
    ledger.record_copies([FIRST], at(1))
    ledger.record_local_copies([FIRST, SECOND], at(1))
    ledger.take(2, 4, 10)
    recover(ledger, 2, {FIRST: 1})
    assert getattr(ledger, level).experts_per_layer == 1
    ledger.take(3, 4, 10)
    recover(ledger, 3, {FIRST: 1})
    assert getattr(ledger, level).experts_per_layer == 2


def test_a_copy_that_was_lost_in_flight_does_not_protect_what_is_older(ledger):
    ledger.record_copies([FIRST], at(0))
    ledger.take(1, 5, 50)
    ledger.record_local_copies([FIRST], at(1))
    ledger.take(2, 7, 70)
    ledger.record_copies([FIRST], at(2))  # and the member dies with it
    lost = ledger.count_lost({FIRST: at(1)})
    ledger.record_recovery(2, lost, {FIRST: at(1)})
    assert lost == {FIRST: 7}
    assert ledger.selection.at_risk[0, 0] == 5


def test_skips_that_are_not_in_the_table_yet_outlive_a_recovery(ledger):
    ledger.take(1, 5, 50)
    ledger.record_copies([FIRST], at(1))
    ledger.take(2, 7, 70)
    known = ledger.marks.pending
    ledger.drop_copies([FIRST], at(1))
    assert ledger.marks.pending > known, "who learnt of them knows more"
    other = make_ledger()
    for each in (ledger, other):
        other.load_fields(ledger.to_fields())
        each.marks.table.copy_(ledger.marks.table)
    other.marks.fold()
    assert other.marks.marks(SAVED)[0, ..., 1].tolist() == [[0, 0]]


# ---- after a crash of all processes


def crashed(ledger):
    """A new process, to which the state came back as it was."""
    again = make_ledger(max_lost_token_fraction=ledger.selection_limit)
    for name in ("average", "tokens"):
        getattr(again._state.expert_load, name).copy_(getattr(ledger._state.expert_load, name))
    again.marks.state.copy_(ledger.marks.state)
    return again


def test_a_crash_of_all_forgets_neither_what_is_at_risk_nor_what_was_lost():
    ledger = make_ledger(max_lost_token_fraction=0.05)
    ledger.selection_limit = 0.05
    ledger.record_copies([FIRST, SECOND], at(0))
    ledger.take(1, 5, 50)
    ledger.record_local_copies([FIRST, SECOND], at(1))
    ledger.take(2, 7, 70)
    recover(ledger, 2, {FIRST: 1, SECOND: 1})
    ledger.take(3, 1, 1)
    again = crashed(ledger)
    lost = again.count_lost({SECOND: at(1)})
    assert lost == {SECOND: 1}
    again.record_recovery(3, lost, {SECOND: at(1)})
    assert again.selection.lost.tolist() == again.lost_LE.tolist() == [[7, 71]]
    assert again.selection.at_risk.tolist() == [[6, 50]]
    assert again.local.at_risk.tolist() == [[1, 0]]
    assert again.selection.experts_per_layer == ledger.selection.experts_per_layer == 2


def count_and_crash(group):
    """A recovery has counted what stale experts lost; then all processes crash, before a step is taken."""
    ledger = make_ledger()
    ledger.record_copies([FIRST, SECOND], at(0))
    ledger.take(1, 5, 50)
    ledger.record_copies([SECOND], at(1))
    told = ledger.agree_on_lost(group, {FIRST: at(0)}, at(1), at(1))
    ledger.selection_limit = 1.0
    return {"told": told, "lost": crashed(ledger).count_lost({FIRST: at(0), SECOND: at(1)})}


def test_copies_of_the_version_from_which_all_resume_outlive_a_crash():
    found = alone(count_and_crash)
    assert found == {"told": {FIRST: 5}, "lost": {FIRST: 0, SECOND: 0}}


def test_steps_that_no_survivor_has_counted_are_at_risk(ledger):
    ledger.take(1, 5, 50)
    ledger.total_LE[:] = [[12, 120]]  # of a newer state, which a dead member has left
    ledger.record_recovery(2, {})
    assert ledger.selection.seen.tolist() == ledger.selection.at_risk.tolist() == [[12, 120]]


def count_with_a_replica_node(group):
    """Rank 1 trains nothing, so that it has counted nothing."""
    ledger = make_ledger()
    if group.rank == 0:
        ledger.take(1, 5, 50)
        ledger.take(2, 5, 40)
    ledger.agree_on_lost(group, {FIRST: at(0)}, at(2), None if group.rank else at(2))
    return ledger.plt


def test_a_replica_node_reports_the_same_portion(tmp_path):
    assert run_threads(tmp_path, 2, count_with_a_replica_node) == [0.1, 0.1]


def go_back(group):
    """All resume from a step before: the only copies of a unit that is no expert are of that one."""
    ledger = make_ledger()
    ledger.take(1, 5, 50)
    ledger.record_copies([FIRST], at(1))
    ledger.take(2, 7, 70)
    state = ledger._state.expert_load.tokens.clone(), ledger.marks.state.clone()
    ledger.record_copies([FIRST, SECOND], at(2))
    ledger.take(3, 1, 10)
    for now, before in zip((ledger._state.expert_load.tokens, ledger.marks.state), state, strict=True):
        now.copy_(before)
    ledger.agree_on_lost(group, {}, at(2), at(3))
    return [getattr(ledger.selection, name).tolist() for name in ("seen", "at_risk")]


def test_tokens_of_steps_that_are_undone_are_neither_seen_nor_at_risk():
    found = alone(go_back)
    assert found == [[[12, 120]], [[7, 120]]]


def test_a_preset_whose_recoveries_lose_nothing_notes_no_copies():
    layer = MoE(8, 8, 2, top_k=1)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    ledger = LossLedger(state, Pec(), records_copies=False)
    ledger.record_copies([FIRST, SECOND], at(1))
    ledger.record_local_copies([FIRST], at(1))
    ledger.record_checkpoint(at(1))
    assert ledger.marks.pending == 0
