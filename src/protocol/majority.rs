//! Majority rule for sets of several Lighthouses, which may name two sets at the same time.

use super::event::{Begun, LastGroup, Participant};

/// Number of present members of a group, and its size, if they are too few to succeed the group or have an older state.
///
/// Two sets without a common member must never both continue. A group is succeeded by one with more than half of its
/// members, or with exactly half including the lowest id: two such sets share a member. Members that begin to connect a
/// group may not learn whether all of them connected. So the rule holds for the newest group that a present member was
/// connected in, and for each later group that a present member has begun (dynamic voting: Yeger Lotem, Keidar, Dolev,
/// 1997). Two connected groups share a member that has begun one after the other: a begun group of the same generation
/// as the newest connected one was never connected.
///
/// "a", "b" and "c" were connected. "a" and "b" are half of the four members that "a" has begun to connect since, and
/// "a" has the lowest id. But "b" is one of the four and has not begun that group. It now asks for another one, so the
/// four can never have been connected, and only the group of three counts.
pub(super) fn lacking(participants: &[&Participant]) -> Option<(usize, usize)> {
    let last_groups =
        || participants.iter().filter_map(|participant| participant.standing.last_group.as_ref());
    let newest = last_groups().max_by_key(|last_group| last_group.generation);
    if let Some(lacking) = newest.and_then(|newest| lacking_of_connected(newest, participants)) {
        return Some(lacking);
    }
    let is_later = |generation: u64| newest.is_none_or(|newest| generation > newest.generation);
    let too_few = begun(participants).filter(|&(.., generation)| is_later(generation)).find_map(
        |(_, begun, epoch, _)| {
            let members =
                || participants.iter().filter(|participant| begun.members.contains(&participant.id));
            let may_be_connected = members().all(|participant| has_begun(participant, epoch));
            let (found, size) = (members().count(), begun.members.len());
            let has_first = members().any(|participant| is_first(begun, &participant.id));
            (may_be_connected && !is_enough(found, size, has_first)).then_some((found, size))
        },
    );
    too_few.or_else(|| older(newest, participants))
}

/// Number of present members of the newest connected group, and its size, if no present member has the newest state
/// known to them.
///
/// Members are connected before they have the state. A returning member counts for a group with those that continued
/// without it. It must not succeed them if that group breaks before it has their state.
fn older(newest: Option<&LastGroup>, participants: &[&Participant]) -> Option<(usize, usize)> {
    let standings = || participants.iter().map(|participant| &participant.standing);
    let is_older =
        standings().map(|standing| standing.state).max() < standings().map(|standing| standing.known).max();
    is_older.then(|| match newest {
        Some(last_group) => {
            (participants.iter().filter(|each| has_begun(each, last_group.epoch)).count(), last_group.size)
        }
        None => (participants.len(), participants.len()),
    })
}

/// The same for the newest group that a present member was connected in.
///
/// Members that announced their departure do not count for members that know that they left. Others, including the
/// leavers, cannot know: the members that stayed may have continued without them. So a set with leavers also needs more
/// than half of the rest.
fn lacking_of_connected(newest: &LastGroup, participants: &[&Participant]) -> Option<(usize, usize)> {
    let last_groups = || {
        let last_groups =
            participants.iter().filter_map(|participant| participant.standing.last_group.as_ref());
        last_groups.filter(|last_group| last_group.epoch == newest.epoch)
    };
    let found = participants.iter().filter(|participant| has_begun(participant, newest.epoch)).count();
    let has_first = last_groups().any(|last_group| last_group.is_first)
        || begun(participants).any(|(id, begun, epoch, _)| epoch == newest.epoch && is_first(begun, id));
    let leavers = last_groups().filter(|last_group| last_group.leaves).count();
    let stay = found - leavers;
    let left = last_groups().map(|last_group| last_group.left).max().unwrap_or(0);
    let needed = match left {
        0 => vec![(found, newest.size), (stay, newest.size.saturating_sub(leavers))],
        _ => vec![(stay, newest.size.saturating_sub(left))],
    };
    needed.into_iter().find(|&(found, size)| !is_enough(found, size, has_first))
}

/// All groups that present members have begun: the member's id, the group's members, its epoch and its generation.
fn begun<'a>(participants: &[&'a Participant]) -> impl Iterator<Item = (&'a str, &'a Begun, u64, u64)> {
    participants.iter().flat_map(|&participant| {
        let groups = move |begun: &'a Begun| {
            begun
                .groups
                .iter()
                .map(move |&(epoch, generation)| (&participant.id[..], begun, epoch, generation))
        };
        participant.standing.begun.iter().flat_map(groups)
    })
}

/// Whether a member has begun a group, connected or not.
fn has_begun(participant: &Participant, epoch: u64) -> bool {
    let standing = &participant.standing;
    standing.last_group.as_ref().is_some_and(|last_group| last_group.epoch == epoch)
        || standing.begun.iter().flat_map(|begun| &begun.groups).any(|&(begun, _)| begun == epoch)
}

fn is_first(begun: &Begun, id: &str) -> bool {
    begun.members.first().is_some_and(|first| first == id)
}

fn is_enough(found: usize, size: usize, has_first: bool) -> bool {
    2 * found > size || (2 * found == size && has_first)
}
