//! Recovery plans with units that may lag, compared with an oracle that tries every version, and important cases by
//! name.

use evermoe::recovery::{Conflict, Holding, Kind, Plan, Reason, Transfer, plan, plan_lagging};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn held(unit: usize, version: u64, kind: Kind) -> Holding {
    Holding { unit, version, digest: 7, kind }
}

fn transfer(unit: usize, source: usize, destination: usize, kind: Kind) -> Transfer {
    Transfer { unit, source, destination, kind }
}

#[test]
fn a_newer_target_is_preferred_to_one_without_laggards() {
    // At version 8 all units are complete; at 9 unit 1, which may lag, is not, so it is one step behind.
    let holdings =
        [vec![held(0, 9, Kind::Active), held(0, 8, Kind::Snapshot)], vec![held(1, 8, Kind::Snapshot)]];
    let plan = plan_lagging(&[8, 8], &holdings, &[vec![0, 1], vec![1]], &[1]).unwrap();
    assert_eq!((plan.version, plan.reason), (Some(9), Reason::Lagging { units: 1 }));
    assert_eq!(plan.stale, [(1, 8)]);
    assert_eq!(plan.transfers, [transfer(1, 1, 0, Kind::Snapshot), transfer(1, 1, 1, Kind::Snapshot)]);
}

#[test]
fn no_rank_keeps_another_version_of_a_stale_unit() {
    // Rank 1 runs unit 1 at version 5 only because it stopped at that version; all take rank 2's snapshot of version 6.
    let holdings = [
        vec![held(0, 7, Kind::Active)],
        vec![held(0, 5, Kind::Active), held(1, 5, Kind::Active)],
        vec![held(0, 7, Kind::Active), held(1, 6, Kind::Snapshot)],
    ];
    let plan = plan_lagging(&[8, 8], &holdings, &[vec![0, 1], vec![0, 1], vec![0]], &[1]).unwrap();
    assert_eq!((plan.version, plan.stale), (Some(7), vec![(1, 6)]));
    let expected = [
        transfer(0, 0, 1, Kind::Active),
        transfer(1, 2, 0, Kind::Snapshot),
        transfer(1, 2, 1, Kind::Snapshot),
    ];
    assert_eq!(plan.transfers, expected);
}

#[test]
fn what_is_newer_than_the_target_is_not_taken() {
    // Unit 0 may not lag and is complete at 4; unit 1 has later steps, which were undone.
    let holdings = [vec![held(0, 4, Kind::Active), held(1, 3, Kind::Persisted), held(1, 5, Kind::Snapshot)]];
    let plan = plan_lagging(&[8, 8], &holdings, &[vec![1]], &[1]).unwrap();
    assert_eq!((plan.version, plan.stale), (Some(4), vec![(1, 3)]));
}

#[test]
fn memory_comes_before_files_and_a_rank_reads_its_own_files() {
    let (memory, file) = (held(0, 4, Kind::Replayed), held(0, 4, Kind::Persisted));
    let needs = [vec![0], vec![0]];
    let sent = plan(&[8], &[vec![file], vec![memory]], &needs).unwrap();
    assert_eq!(sent.transfers, [transfer(0, 1, 0, Kind::Replayed), transfer(0, 1, 1, Kind::Replayed)]);
    let read = plan(&[8], &[vec![file], vec![file]], &needs).unwrap();
    assert_eq!(read.transfers, [transfer(0, 0, 0, Kind::Persisted), transfer(0, 1, 1, Kind::Persisted)]);
    let only_one_sees_it = plan(&[8], &[vec![], vec![file]], &needs).unwrap();
    assert_eq!(
        only_one_sees_it.transfers,
        [transfer(0, 1, 0, Kind::Persisted), transfer(0, 1, 1, Kind::Persisted)]
    );
}

#[test]
fn a_file_that_many_list_is_one_copy_and_does_not_outvote_memory() {
    let file = Holding { digest: 9, ..held(0, 4, Kind::Persisted) };
    let holdings = [vec![file], vec![file], vec![file, held(0, 4, Kind::Snapshot)]];
    let plan = plan(&[8], &holdings, &[vec![0], vec![], vec![]]).unwrap();
    assert_eq!(plan.transfers, [transfer(0, 2, 0, Kind::Snapshot)]);
    let outvoted = |rank| Conflict { unit: 0, rank, digest: 9, expected: 7 };
    assert_eq!(plan.conflicts, [0, 1, 2].map(outvoted));
}

#[test]
fn a_unit_that_may_lag_and_is_nowhere_is_lost() {
    let holdings = [vec![held(0, 9, Kind::Active), held(1, 0, Kind::Active)]];
    let plan = plan_lagging(&[8, 8], &holdings, &[vec![0, 1]], &[1]).unwrap();
    assert_eq!((plan.version, plan.reason), (None, Reason::Incomplete { version: 9 }));
    assert_eq!((plan.lost, plan.stale), (vec![1], vec![]));
}

#[test]
fn may_lag_names_units() {
    let error = plan_lagging(&[8], &[], &[], &[1]).unwrap_err().to_string();
    assert!(error.starts_with("may_lag: unit 1 is named; there are 1 units"), "{error}");
}

const UNITS: usize = 3;
const KINDS: [Kind; 4] = [Kind::Active, Kind::Replayed, Kind::Snapshot, Kind::Persisted];

#[derive(Clone, Debug)]
struct Case {
    bytes: Vec<u64>,
    holdings: Vec<Vec<Holding>>,
    needs: Vec<Vec<usize>>,
    may_lag: Vec<usize>,
}

fn cases() -> impl Strategy<Value = Case> {
    let holding = (0..UNITS, prop_oneof![1 => Just(0_u64), 8 => 1_u64..5], 1_u64..3, 0..4_usize)
        .prop_map(|(unit, version, digest, kind)| Holding { unit, version, digest, kind: KINDS[kind] });
    let rank = (prop::collection::vec(holding, 0..7), prop::collection::vec(0..UNITS, 0..4));
    let bytes = prop::collection::vec(1_u64..4, UNITS);
    let may_lag = prop::collection::vec(0..UNITS, 0..4);
    (bytes, prop::collection::vec(rank, 1..5), may_lag).prop_map(|(bytes, ranks, may_lag)| {
        let (holdings, needs) = ranks.into_iter().unzip();
        Case { bytes, holdings, needs, may_lag }
    })
}

impl Case {
    fn rows(&self) -> Vec<(usize, Holding)> {
        let trained = self.holdings.iter().flatten().any(|held| held.version > 0);
        let ranks = self.holdings.iter().enumerate();
        ranks
            .flat_map(|(rank, held)| held.iter().map(move |held| (rank, *held)))
            .filter(|(_, held)| held.version > 0 || !trained)
            .collect()
    }

    /// The version of a unit when the job resumes from `target`.
    fn version(&self, unit: usize, target: u64) -> Option<u64> {
        let oldest = if self.may_lag.contains(&unit) { 0 } else { target };
        (oldest..=target)
            .rev()
            .find(|at| self.rows().iter().any(|(_, held)| (held.unit, held.version) == (unit, *at)))
    }

    fn missing(&self, target: u64) -> Vec<usize> {
        (0..UNITS).filter(|&unit| self.version(unit, target).is_none()).collect()
    }

    /// Rank and kind of the holders with the right bytes.
    fn holders(&self, unit: usize, version: u64) -> Vec<(usize, Kind)> {
        let rows: Vec<(usize, Holding)> = self
            .rows()
            .into_iter()
            .filter(|(_, held)| (held.unit, held.version) == (unit, version))
            .collect();
        let of = |digest: u64| rows.iter().filter(move |(_, held)| held.digest == digest);
        let ranks = |digest: u64, any: bool| {
            let counted = of(digest).filter(|(_, held)| any || held.kind != Kind::Persisted);
            counted.map(|(rank, _)| *rank).collect::<BTreeSet<_>>()
        };
        let right = (0..9_u64).filter(|&digest| of(digest).next().is_some()).min_by_key(|&digest| {
            let votes = ranks(digest, false).len();
            let kind = KINDS.iter().position(|kind| of(digest).any(|(_, held)| held.kind == *kind));
            (
                usize::MAX - votes,
                kind,
                usize::MAX - ranks(digest, true).len(),
                ranks(digest, true).first().copied(),
            )
        });
        right.map_or(vec![], |digest| of(digest).map(|(rank, held)| (*rank, held.kind)).collect())
    }

    /// A rank's action for the unit: none, read its own copy of the best of `kinds`, or receive it.
    fn own(&self, rank: usize, holders: &[(usize, Kind)]) -> Option<Kind> {
        let mine = KINDS.into_iter().find(|kind| holders.contains(&(rank, *kind)))?;
        let in_memory = holders.iter().any(|(_, kind)| *kind != Kind::Persisted);
        (mine != Kind::Persisted || !in_memory).then_some(mine)
    }

    fn check_transfers(&self, plan: &Plan, target: u64) {
        let mut expected = BTreeSet::new();
        for (rank, units) in self.needs.iter().enumerate() {
            for &unit in units {
                let holders = self.holders(unit, self.version(unit, target).unwrap());
                if self.own(rank, &holders) != Some(Kind::Active) {
                    expected.insert((unit, rank));
                }
            }
        }
        let planned: Vec<(usize, usize)> =
            plan.transfers.iter().map(|step| (step.unit, step.destination)).collect();
        assert_eq!(planned.iter().copied().collect::<BTreeSet<_>>(), expected);
        assert_eq!(planned.len(), expected.len(), "a unit comes once");
        let mut sent = vec![0; self.needs.len()];
        for step in &plan.transfers {
            let holders = self.holders(step.unit, self.version(step.unit, target).unwrap());
            assert!(holders.contains(&(step.source, step.kind)), "the source has the right bytes: {step:?}");
            if let Some(kind) = self.own(step.destination, &holders) {
                assert_eq!((step.source, step.kind), (step.destination, kind), "from itself");
                continue;
            }
            assert_ne!(step.source, step.destination);
            let memory: Vec<_> = holders.iter().filter(|(_, kind)| *kind != Kind::Persisted).collect();
            let senders = if memory.is_empty() { holders.iter().collect() } else { memory };
            let least = senders.iter().map(|(rank, kind)| (sent[*rank], *kind, *rank)).min().unwrap();
            assert_eq!((sent[step.source], step.kind, step.source), least, "{step:?}");
            sent[step.source] += self.bytes[step.unit];
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn plans_follow_the_rules(case in cases()) {
        let plan = plan_lagging(&case.bytes, &case.holdings, &case.needs, &case.may_lag).unwrap();
        // Only reported versions; newest first, so that of equal ones the newest is found.
        let reported: BTreeSet<u64> = case.rows().iter().map(|(_, held)| held.version).collect();
        let best = reported.iter().rev().copied().min_by_key(|&at| case.missing(at).len());
        match best.filter(|&at| case.missing(at).is_empty()) {
            None => {
                prop_assert_eq!(plan.version, None);
                prop_assert_eq!(&plan.lost, &best.map_or_else(|| (0..UNITS).collect(), |at| case.missing(at)));
                prop_assert!(plan.transfers.is_empty() && plan.conflicts.is_empty() && plan.stale.is_empty());
            }
            Some(target) => {
                prop_assert_eq!((plan.version, plan.lost.len()), (Some(target), 0));
                let stale: Vec<(usize, u64)> = (0..UNITS)
                    .filter_map(|unit| Some((unit, case.version(unit, target)?)))
                    .filter(|&(_, at)| at < target)
                    .collect();
                prop_assert_eq!(&plan.stale, &stale);
                let reason = match reported.last() {
                    _ if !stale.is_empty() => Reason::Lagging { units: stale.len() },
                    Some(&newest) if newest != target => Reason::Older { newest },
                    _ if target == 0 => Reason::Fresh,
                    _ => Reason::Newest,
                };
                prop_assert_eq!(plan.reason, reason);
                case.check_transfers(&plan, target);
            }
        }
    }

    #[test]
    fn without_units_that_may_lag_nothing_is_stale(case in cases()) {
        let strict = plan(&case.bytes, &case.holdings, &case.needs).unwrap();
        prop_assert!(strict.stale.is_empty());
        let lax = plan_lagging(&case.bytes, &case.holdings, &case.needs, &case.may_lag).unwrap();
        prop_assert!(lax.version >= strict.version, "units that may lag never make the target older");
    }
}
