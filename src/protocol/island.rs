//! Islands: groups of processes that hold the dense part of a model together, and take part together or not at all.

use super::event::{Island, Participant};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the participants without the members of incomplete islands; the result is the same on all members.
///
/// An island is complete if each of its positions is present exactly once, and all report the same size.
///
/// Of the island "y", only position 1 is present:
/// ```
/// use evermoe::protocol::{Island, Participant, Standing, without_incomplete_islands};
/// let standing = Standing {
///     epoch: None, established: true, size: 4, generation: 1, state: 1, has_progress: true, named: vec![], adopted: 1,
///     inquires: false, is_done: false, is_spare: false, last_group: None, known: 0, begun: vec![],
/// };
/// let member = |id: &str, name: &str, position| Participant {
///     id: id.into(), rank_key: "".into(), island: Some(Island { name: name.into(), position, size: 2 }), trains: true,
///     waits: true, is_patient: false, unreachable: vec![], standing: standing.clone(),
/// };
/// let all = [member("a", "x", 0), member("b", "x", 1), member("d", "y", 1)];
/// let found: Vec<_> = without_incomplete_islands(&all).into_iter().map(|each| each.id).collect();
/// assert_eq!(found, ["a", "b"]);
/// ```
pub fn without_incomplete_islands(participants: &[Participant]) -> Vec<Participant> {
    let islands = by_name(participants);
    let counts =
        |each: &&Participant| each.island.as_ref().is_none_or(|own| is_complete(&islands[&*own.name]));
    participants.iter().filter(counts).cloned().collect()
}

/// Whether nothing may happen in a set, as members that it leaves out may continue elsewhere: one trains, or only they have
/// state of the job. The others must not begin the job again.
pub(super) fn may_run_elsewhere(participants: &[Participant]) -> bool {
    let islands = by_name(participants);
    let is_left_out =
        |each: &Participant| each.island.as_ref().is_some_and(|own| !is_complete(&islands[&*own.name]));
    let (left_out, complete): (Vec<_>, Vec<_>) = participants.iter().partition(|each| is_left_out(each));
    let has_state = |members: &[&Participant]| members.iter().any(|each| each.standing.established);
    left_out.iter().any(|each| !each.waits) || (has_state(&left_out) && !has_state(&complete))
}

/// Number of positions that are present of a member's island, and its size; none if the member has no island, or if the
/// island is complete.
pub(super) fn incomplete(participants: &[Participant], id: &str) -> Option<(usize, usize)> {
    let own = participants.iter().find(|each| each.id == id)?.island.as_ref()?;
    let islands = by_name(participants);
    let island = &islands[&*own.name];
    let positions: BTreeSet<usize> = island.iter().map(|each| each.position).collect();
    (!is_complete(island)).then_some((positions.len(), own.size))
}

fn by_name(participants: &[Participant]) -> BTreeMap<&str, Vec<&Island>> {
    let mut found: BTreeMap<&str, Vec<&Island>> = BTreeMap::new();
    for island in participants.iter().filter_map(|each| each.island.as_ref()) {
        found.entry(&island.name).or_default().push(island);
    }
    found
}

fn is_complete(island: &[&Island]) -> bool {
    let size = island.len();
    let positions: BTreeSet<usize> = island.iter().map(|each| each.position).collect();
    positions.len() == size && island.iter().all(|each| each.size == size && each.position < size)
}
