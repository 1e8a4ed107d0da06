//! Choice of the members that continue when some cannot reach each other.

use super::event::Participant;
use super::majority::lacking;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Limit of the search; beyond it the best set found so far is taken.
const MAX_BRANCHES: usize = 20_000;

/// Returns the ids of the members that continue; all of them reach each other.
///
/// The set has the most members whose state was made by the newest generation: others lack steps that those have
/// committed. Ties are broken by size, then by the lowest ids. The same table gives the same set on every member. Two
/// members reach each other unless one of them reports that it does not reach the other. An island continues or leaves
/// as one; it leaves if its own members do not reach each other.
///
/// A partition separates "a" and "b" from "c" and "d", and no majority is left: the half with the lowest id continues.
/// ```
/// use evermoe::protocol::{Participant, Standing, reach_each_other};
/// let standing = Standing {
///     epoch: None, established: true, size: 4, generation: 1, state: 1, has_progress: true, named: vec![], adopted: 1,
///     inquires: false, is_done: false, is_spare: false, last_group: None, known: 0, begun: vec![],
/// };
/// let member = |id: &str, unreachable: &[&str]| Participant {
///     id: id.into(), rank_key: "".into(), island: None, trains: true, waits: true, is_patient: false,
///     unreachable: unreachable.iter().map(|&other| other.into()).collect(), standing: standing.clone(),
/// };
/// let table = [member("a", &["c", "d"]), member("b", &["c"]), member("c", &[]), member("d", &["b"])];
/// assert_eq!(reach_each_other(&table).into_iter().collect::<Vec<_>>(), ["a", "b"]);
/// ```
pub fn reach_each_other(participants: &[Participant]) -> BTreeSet<&str> {
    who_stays(participants, false)
}

/// As [`reach_each_other`]. With `is_majority`, a set that may continue despite several Lighthouses comes first.
pub(super) fn who_stays(participants: &[Participant], is_majority: bool) -> BTreeSet<&str> {
    let ids: BTreeSet<&str> = participants.iter().map(|participant| participant.id.as_str()).collect();
    let ids: Vec<&str> = ids.into_iter().collect();
    let index = |id: &str| ids.binary_search(&id).ok();
    let mut cut = vec![BTreeSet::new(); ids.len()];
    let islands = islands(participants, index);
    let mates = |member: usize| islands.get(&member).cloned().unwrap_or_else(|| BTreeSet::from([member]));
    for participant in participants {
        let Some(from) = index(&participant.id) else { continue };
        for to in participant.unreachable.iter().filter_map(|id| index(id)).filter(|&to| to != from) {
            for member in mates(from) {
                cut[member].extend(mates(to));
            }
            for member in mates(to) {
                cut[member].extend(mates(from));
            }
        }
    }
    let is_torn = |member: &usize| cut[*member].contains(member); // its island is cut in itself
    let newest = participants.iter().map(|participant| participant.standing.state).max();
    let mut is_newest = vec![false; ids.len()];
    for participant in participants.iter().filter(|participant| Some(participant.standing.state) == newest) {
        if let Some(member) = index(&participant.id) {
            is_newest[member] = true;
        }
    }
    let may_go_on = |set: &BTreeSet<usize>| {
        let is_in = |participant: &&Participant| index(&participant.id).is_some_and(|at| set.contains(&at));
        !set.is_empty()
            && (!is_majority || lacking(&participants.iter().filter(is_in).collect::<Vec<_>>()).is_none())
    };
    let mut search = Search {
        cut: &cut,
        is_newest: &is_newest,
        may_go_on: &may_go_on,
        best: BTreeSet::new(),
        branches: MAX_BRANCHES,
    };
    search.run((0..ids.len()).filter(|member| !is_torn(member)).collect());
    search.best.into_iter().map(|member| ids[member]).collect()
}

/// The members of each member's island, if it has one.
fn islands(
    participants: &[Participant],
    index: impl Fn(&str) -> Option<usize>,
) -> BTreeMap<usize, BTreeSet<usize>> {
    let mut by_name: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for participant in participants {
        if let (Some(island), Some(member)) = (&participant.island, index(&participant.id)) {
            by_name.entry(&island.name).or_default().insert(member);
        }
    }
    let of_members =
        |island: BTreeSet<usize>| island.clone().into_iter().map(move |each| (each, island.clone()));
    by_name.into_values().flat_map(of_members).collect()
}

/// Branch-and-bound search for the best set without a separated pair: at each member with cuts, one branch includes it
/// and one excludes it.
struct Search<'a> {
    /// The members that each member does not reach.
    cut: &'a [BTreeSet<usize>],
    /// Whether each member's state is of the newest generation.
    is_newest: &'a [bool],
    /// Whether a set may continue.
    may_go_on: &'a dyn Fn(&BTreeSet<usize>) -> bool,
    best: BTreeSet<usize>,
    branches: usize,
}

impl Search<'_> {
    fn worth<'a>(&self, set: &'a BTreeSet<usize>) -> (bool, usize, usize, Reverse<Vec<&'a usize>>) {
        let newest = set.iter().filter(|&&member| self.is_newest[member]).count();
        ((self.may_go_on)(set), newest, set.len(), Reverse(set.iter().collect()))
    }

    fn run(&mut self, left: BTreeSet<usize>) {
        let cuts = |member: &usize| self.cut[*member].intersection(&left).count();
        // Among members with equally many cuts the lowest is branched on first, so that the first set found contains
        // it.
        let most = left.iter().copied().max_by_key(|member| (cuts(member), Reverse(*member)));
        let Some(most) = most.filter(|member| cuts(member) > 0) else {
            if self.worth(&left) > self.worth(&self.best) {
                self.best = left;
            }
            return;
        };
        if self.branches == 0 && !self.best.is_empty() {
            return;
        }
        self.branches = self.branches.saturating_sub(1);
        self.run(left.difference(&self.cut[most]).copied().collect());
        self.run(left.iter().copied().filter(|&member| member != most).collect());
    }
}
