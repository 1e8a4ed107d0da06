//! Recovery plans compared with a slow, obvious reading of the rules, and important cases by name.

use evermoe::recovery::{Conflict, Holding, Kind, Plan, Reason, Transfer, plan, plan_on_nodes};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn held(unit: usize, version: u64, digest: u64, kind: Kind) -> Holding {
    Holding { unit, version, digest, kind }
}

fn active(unit: usize, version: u64) -> Holding {
    held(unit, version, 7, Kind::Active)
}

fn snapshot(unit: usize, version: u64) -> Holding {
    held(unit, version, 7, Kind::Snapshot)
}

fn transfer(unit: usize, source: usize, destination: usize, kind: Kind) -> Transfer {
    Transfer { unit, source, destination, kind }
}

#[test]
fn survivors_one_step_apart_go_back_to_the_version_that_is_whole() {
    // Rank 1 has committed version 9 and has 8 in its other buffer; rank 0 is still at 8, rank 2 died.
    let holdings = [vec![active(0, 8), snapshot(1, 8)], vec![active(1, 9), snapshot(1, 9), snapshot(1, 8)]];
    let plan = plan(&[64, 64], &holdings, &[vec![0], vec![1]]).unwrap();
    assert_eq!((plan.version, plan.reason), (Some(8), Reason::Older { newest: 9 }));
    assert_eq!(plan.transfers, [transfer(1, 1, 1, Kind::Snapshot)]);
}

#[test]
fn a_newcomer_fetches_from_all_holders_evenly() {
    let full = || (0..4).map(|unit| active(unit, 3)).collect::<Vec<_>>();
    let plan =
        plan(&[10, 40, 20, 30], &[full(), full(), vec![]], &[vec![], vec![], vec![0, 1, 2, 3]]).unwrap();
    let expected =
        [(1, 0), (3, 1), (2, 1), (0, 0)].map(|(unit, source)| transfer(unit, source, 2, Kind::Active));
    assert_eq!(plan.transfers, expected);
}

#[test]
fn the_digest_of_most_ranks_wins_and_the_outvoted_fetch() {
    let holdings = [vec![held(0, 4, 1, Kind::Active)], vec![active(0, 4)], vec![snapshot(0, 4)]];
    let plan = plan(&[64], &holdings, &[vec![0], vec![0], vec![]]).unwrap();
    assert_eq!(plan.conflicts, [Conflict { unit: 0, rank: 0, digest: 1, expected: 7 }]);
    assert_eq!(plan.transfers, [transfer(0, 1, 0, Kind::Active)]);
}

#[test]
fn of_equal_votes_the_running_model_then_the_smallest_rank_wins() {
    let winner = |first: Kind, second: Kind| {
        let plan = plan(&[64], &[vec![held(0, 4, 1, first)], vec![held(0, 4, 2, second)]], &[vec![], vec![]])
            .unwrap();
        plan.conflicts[0].expected
    };
    assert_eq!(winner(Kind::Active, Kind::Active), 1);
    assert_eq!(winner(Kind::Snapshot, Kind::Snapshot), 1);
    assert_eq!(winner(Kind::Snapshot, Kind::Active), 2);
}

#[test]
fn version_0_counts_only_while_nobody_has_made_a_step() {
    let fresh =
        plan(&[8], &[vec![active(0, 0)], vec![held(0, 0, 9, Kind::Active)]], &[vec![0], vec![0]]).unwrap();
    assert_eq!((fresh.version, fresh.reason, fresh.conflicts.len()), (Some(0), Reason::Fresh, 0));
    assert_eq!(fresh.transfers, [transfer(0, 0, 1, Kind::Active)]);
    // Unit 1 has been trained and is gone: a newcomer's fresh one must not take its place.
    let holdings = [vec![active(0, 5)], vec![active(0, 0), active(1, 0)]];
    let lossy = plan(&[8, 8], &holdings, &[vec![0], vec![1]]).unwrap();
    assert_eq!((lossy.version, lossy.reason, lossy.lost), (None, Reason::Incomplete { version: 5 }, vec![1]));
}

#[test]
fn nothing_is_left() {
    let plan = plan(&[8, 8], &[vec![], vec![]], &[vec![0], vec![1]]).unwrap();
    assert_eq!((plan.version, plan.reason, plan.lost), (None, Reason::Nothing, vec![0, 1]));
}

#[test]
fn the_fewest_units_are_lost_and_of_those_the_newest() {
    let holdings = [vec![active(0, 3), active(1, 3), active(0, 4), active(2, 4), active(2, 5)]];
    let plan = plan(&[8, 8, 8], &holdings, &[vec![]]).unwrap();
    assert_eq!((plan.version, plan.lost), (None, vec![1]));
}

#[test]
fn errors_name_the_argument() {
    let message = |holdings: &[Vec<Holding>], needs: &[Vec<usize>]| {
        plan(&[8], holdings, needs).unwrap_err().to_string()
    };
    assert!(message(&[vec![]], &[]).starts_with("needs: expected one list for each of the 1 ranks"));
    assert!(message(&[vec![active(1, 1)]], &[vec![]]).starts_with("holdings: rank 0 names unit 1"));
    assert!(message(&[vec![]], &[vec![1]]).starts_with("needs: rank 0 names unit 1"));
}

const UNITS: usize = 3;

fn survey() -> impl Strategy<Value = (Vec<Vec<Holding>>, Vec<Vec<usize>>)> {
    let kind = prop_oneof![Just(Kind::Active), Just(Kind::Snapshot)];
    let holding = (0..UNITS, prop_oneof![1 => Just(0_u64), 6 => 1_u64..4], 1_u64..3, kind)
        .prop_map(|(unit, version, digest, kind)| held(unit, version, digest, kind));
    let rank = (prop::collection::vec(holding, 0..7), prop::collection::vec(0..UNITS, 0..4));
    prop::collection::vec(rank, 1..5).prop_map(|ranks| ranks.into_iter().unzip())
}

/// Versions, newest first, with the units that nobody holds at them.
fn missing(holdings: &[Vec<Holding>]) -> Vec<(u64, Vec<usize>)> {
    let all = || holdings.iter().flatten();
    let trained = all().any(|holding| holding.version > 0);
    let versions: BTreeSet<u64> =
        all().map(|holding| holding.version).filter(|&at| at > 0 || !trained).collect();
    let gone = |version, unit: &usize| !all().any(|held| held.version == version && held.unit == *unit);
    versions.iter().rev().map(|&at| (at, (0..UNITS).filter(|unit| gone(at, unit)).collect())).collect()
}

/// The digests of a unit at a version, best first.
fn ranking(holdings: &[Vec<Holding>], unit: usize, version: u64) -> Vec<u64> {
    let rows = |digest: u64| {
        holdings
            .iter()
            .enumerate()
            .flat_map(move |(rank, held)| held.iter().map(move |held| (rank, *held)))
            .filter(move |(_, held)| held.unit == unit && held.version == version && held.digest == digest)
    };
    let mut digests: Vec<u64> = (0..9).filter(|&digest| rows(digest).next().is_some()).collect();
    digests.sort_by_key(|&digest| {
        let ranks: BTreeSet<usize> = rows(digest).map(|(rank, _)| rank).collect();
        let only_snapshots = rows(digest).all(|(_, held)| held.kind == Kind::Snapshot);
        (usize::MAX - ranks.len(), only_snapshots, ranks.first().copied())
    });
    digests
}

fn check_transfers(
    plan: &Plan,
    version: u64,
    bytes: &[u64],
    holdings: &[Vec<Holding>],
    needs: &[Vec<usize>],
) {
    let has = |rank: usize, unit: usize, kind: Kind| {
        let right = ranking(holdings, unit, version)[0];
        holdings[rank].contains(&held(unit, version, right, kind))
    };
    let mut expected = BTreeSet::new();
    for (rank, units) in needs.iter().enumerate() {
        expected
            .extend(units.iter().filter(|&&unit| !has(rank, unit, Kind::Active)).map(|&unit| (unit, rank)));
    }
    let planned: Vec<(usize, usize)> =
        plan.transfers.iter().map(|step| (step.unit, step.destination)).collect();
    assert_eq!(planned.iter().copied().collect::<BTreeSet<_>>(), expected);
    assert_eq!(planned.len(), expected.len(), "a unit comes once");
    let mut sent = vec![0; holdings.len()];
    for (at, step) in plan.transfers.iter().enumerate() {
        assert!(has(step.source, step.unit, step.kind), "the source has the right bytes: {step:?}");
        assert!(at == 0 || bytes[plan.transfers[at - 1].unit] >= bytes[step.unit], "largest first");
        if has(step.destination, step.unit, Kind::Snapshot) {
            assert_eq!((step.source, step.kind), (step.destination, Kind::Snapshot), "from itself");
            continue;
        }
        let holds =
            |rank: &usize| has(*rank, step.unit, Kind::Active) || has(*rank, step.unit, Kind::Snapshot);
        let least = (0..holdings.len()).filter(holds).map(|rank| sent[rank]).min().unwrap();
        assert_eq!(sent[step.source], least, "from the holder with the fewest bytes: {step:?}");
        let equal_active = |rank: &usize| sent[*rank] == least && has(*rank, step.unit, Kind::Active);
        assert!(
            step.kind == Kind::Active || !(0..holdings.len()).any(|rank| equal_active(&rank)),
            "{step:?}"
        );
        sent[step.source] += bytes[step.unit];
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn plans_follow_the_rules((holdings, needs) in survey(), bytes in prop::array::uniform3(1_u64..4)) {
        let plan = plan(&bytes, &holdings, &needs).unwrap();
        let missing = missing(&holdings);
        match missing.iter().find(|(_, gone)| gone.is_empty()) {
            None => {
                let fewest = missing.iter().min_by_key(|(_, gone)| gone.len()).map(|(_, gone)| gone.clone());
                prop_assert_eq!(plan.version, None);
                prop_assert_eq!(&plan.lost, &fewest.unwrap_or_else(|| (0..UNITS).collect()));
                prop_assert!(plan.transfers.is_empty() && plan.conflicts.is_empty());
            }
            Some(&(version, _)) => {
                prop_assert_eq!((plan.version, plan.lost.len()), (Some(version), 0));
                check_transfers(&plan, version, &bytes, &holdings, &needs);
                let conflict = |unit: usize| ranking(&holdings, unit, version).len() > 1;
                let expected: BTreeSet<usize> = (0..UNITS).filter(|&unit| version > 0 && conflict(unit)).collect();
                prop_assert_eq!(plan.conflicts.iter().map(|conflict| conflict.unit).collect::<BTreeSet<_>>(), expected);
            }
        }
    }

    #[test]
    fn a_unit_crosses_to_a_node_once(
        (holdings, needs) in survey(), bytes in prop::array::uniform3(1_u64..4), nodes in prop::array::uniform4(0_usize..3),
    ) {
        let nodes = &nodes[..needs.len()];
        let plan = plan_on_nodes(&bytes, &holdings, &needs, &[], nodes).unwrap();
        let apart = evermoe::recovery::plan(&bytes, &holdings, &needs).unwrap();
        let arrivals = |plan: &Plan| plan.transfers.iter().map(|each| (each.unit, each.destination)).collect::<BTreeSet<_>>();
        prop_assert_eq!(arrivals(&plan), arrivals(&apart));
        prop_assert_eq!(plan.transfers.len(), apart.transfers.len());
        prop_assert_eq!((plan.version, &plan.lost, &plan.conflicts), (apart.version, &apart.lost, &apart.conflicts));
        let Some(version) = plan.version else { return Ok(()) };
        let has = |rank: usize, unit: usize| {
            let best = ranking(&holdings, unit, version)[0];
            holdings[rank].iter().any(|held| (held.unit, held.version, held.digest) == (unit, version, best))
        };
        let is_direct = |each: &&Transfer| has(each.source, each.unit);
        for passed_on in plan.transfers.iter().filter(|each| !is_direct(each)) {
            prop_assert_eq!(nodes[passed_on.source], nodes[passed_on.destination]);
            let comes = plan.transfers.iter().filter(is_direct);
            let to_source = comes.filter(|each| (each.unit, each.destination) == (passed_on.unit, passed_on.source));
            prop_assert_eq!(to_source.map(|each| each.kind).collect::<Vec<_>>(), [passed_on.kind]);
        }
        for (unit, node) in (0..UNITS).flat_map(|unit| (0..3).map(move |node| (unit, node))) {
            let of_node = || (0..needs.len()).filter(|&rank| nodes[rank] == node);
            let is_lacking = of_node().any(|rank| needs[rank].contains(&unit)) && !of_node().any(|rank| has(rank, unit));
            let crossings = plan.transfers.iter().filter(|each| {
                each.unit == unit && nodes[each.destination] == node && nodes[each.source] != node
            });
            prop_assert_eq!(crossings.count(), usize::from(is_lacking));
        }
    }

    #[test]
    fn the_order_in_which_a_rank_reports_does_not_matter((holdings, needs) in survey()) {
        let turned: Vec<Vec<Holding>> = holdings.iter().map(|held| held.iter().rev().copied().collect()).collect();
        prop_assert_eq!(plan(&[1, 2, 2], &holdings, &needs).unwrap(), plan(&[1, 2, 2], &turned, &needs).unwrap());
    }
}
