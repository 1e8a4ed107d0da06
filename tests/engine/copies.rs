//! Versions and bytes of copies whose units have versions of their own, and of those that follow one schedule.

use super::units;
use evermoe::engine::{Copies, History, Units, VersionSchedule, busiest};
use evermoe::protection::{CopyKind, ProtectionPlan, UnitProtection};
use evermoe::protocol::version_of;
use std::collections::BTreeMap;

fn copies(kinds: [CopyKind; 6], begun: u64) -> Copies {
    let kept = |kind| UnitProtection { kind, primary: 0, holders: vec![1], own: Vec::new() };
    let plan = ProtectionPlan {
        units: kinds.into_iter().map(kept).collect(),
        summary: String::new(),
        delay_seconds: 0.0,
    };
    Copies::new(&plan, &[7, 9], begun, false, &units(true))
}

fn history(versions: impl IntoIterator<Item = (u64, u64)>) -> History {
    let mut history = History::default();
    versions.into_iter().for_each(|(generation, step)| history.record(version_of(generation, step)));
    history
}

const EVERY_THIRD: CopyKind = CopyKind::Snapshot { period: 3 };
const EACH_STEP: CopyKind = CopyKind::Snapshot { period: 1 };

#[test]
fn a_snapshot_every_few_steps_is_complete_a_step_after_it_began() {
    let copies = copies([EVERY_THIRD; 6], version_of(0, 1));
    assert!(!copies.is_late());
    let versions = |steps: u64| copies.version(0, &history((0..=steps).map(|step| (0, step))));
    let found: Vec<u64> = (1..=8).map(versions).collect();
    assert_eq!(found, [1, 1, 1, 3, 3, 3, 6, 6].map(|step| version_of(0, step)));
    assert_eq!((copies.version_bytes(0, &units(true)), copies.version_bytes(5, &units(true))), (33, 10));
}

/// Where all must be able to go back to one version, every snapshot has it.
#[test]
fn one_snapshot_of_each_step_makes_all_of_them_follow_one_schedule() {
    let mut kinds = [EVERY_THIRD; 6];
    (kinds[1], kinds[2]) = (EACH_STEP, CopyKind::Replayed);
    let copies = copies(kinds, version_of(3, 0));
    assert!(copies.is_late());
    let steps = history((0..=4).map(|step| (3, step)));
    assert_eq!(copies.version(0, &steps), copies.version(1, &steps));
    assert_eq!(copies.late(&steps), Some(copies.version(1, &steps)));
    assert_eq!(copies.version(2, &steps), version_of(3, 4), "a replica has every step");
    assert_eq!((copies.version_bytes(0, &units(true)), copies.version_bytes(2, &units(true))), (100, 10));
    let held = copies.held(&steps);
    let of = |unit: usize| {
        held.iter().filter(|each| each.0 == unit).map(|each| (each.1, each.2)).collect::<Vec<_>>()
    };
    assert_eq!(
        of(2),
        [(9, version_of(3, 4)), (9, version_of(3, 0))],
        "and can be brought to the others' version"
    );
    assert_eq!(of(0), [(9, version_of(3, 0)), (7, version_of(3, 0))], "its sender has the snapshot, too");
}

#[test]
fn versions_carry_the_generation_in_which_they_were_made() {
    let steps = history([(0, 0), (0, 1), (0, 2), (0, 3), (2, 3), (2, 4), (3, 5), (3, 6)]);
    let found: Vec<u64> = (0..=6).map(|step| steps.version_at(step)).collect();
    let wanted = [(0, 0), (0, 1), (0, 2), (2, 3), (2, 4), (3, 5), (3, 6)];
    assert_eq!(found, wanted.map(|(generation, step)| version_of(generation, step)));
    let mut back = steps;
    back.record(version_of(4, 2)); // three steps are undone
    assert_eq!(
        (back.newest, back.version_at(2), back.version_at(1)),
        (version_of(4, 2), version_of(4, 2), version_of(0, 1))
    );
}

#[test]
fn a_history_of_many_generations_keeps_the_newest() {
    let steps = history((0..200).map(|step| (step, step)));
    assert_eq!(steps.version_at(199), version_of(199, 199));
    assert_eq!(steps.version_at(170), version_of(170, 170));
}

#[test]
fn the_busiest_node_sends_or_receives_the_most() {
    let sends = BTreeMap::from([((0, 1), 10), ((0, 2), 20), ((1, 2), 15), ((2, 0), 5)]);
    assert_eq!(busiest(&sends), 35, "node 2 receives 20 and 15");
    assert_eq!(busiest(&BTreeMap::from([((0, 1), 10), ((0, 2), 30), ((1, 2), 5)])), 40, "node 0 sends both");
    assert_eq!(busiest(&BTreeMap::new()), 0);
}

#[test]
fn a_version_is_complete_with_the_vote_on_its_last_step() {
    let mut schedule = VersionSchedule::new(4);
    assert_eq!(
        (schedule.begun(), schedule.complete(), schedule.is_due(4), schedule.is_due(5)),
        (4, 4, false, true)
    );
    schedule.begin_version(5, 3);
    assert_eq!((schedule.begun(), schedule.complete()), (5, 4));
    assert_eq!([6, 7, 8, 9].map(|step| schedule.is_due(step)), [false, false, true, true]);
    assert_eq!([5, 6, 7, 8].map(|step| schedule.lag(step)), [0, 1, 2, 2], "4 until the vote on 8, then 5");
}

#[test]
fn sizes_are_those_of_the_units() {
    let units = Units { experts: 2, classes: 2, bytes: vec![1, 2, 3, 4, 50, 60], ..units(false) };
    assert_eq!((units.of_class(0), units.of_class(1)), (vec![1, 2], vec![3, 4]));
    assert_eq!((units.sum(units.dense()), units.sum([1, 3].into_iter())), (110, 6));
}
