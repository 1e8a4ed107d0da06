//! Whether the members of a set may go on where several Lighthouses might name two sets at a time.

use super::event::{Begun, Participant, Seat};

/// How many of a group there are, and how many it had, if they are too few to go on in its place, or have an older state.
///
/// Two sets that share no member must never both go on. A group is followed by one that has more than half of its
/// members, or exactly half with the lowest id among them: no two sets without a common member do. Members that begin to
/// connect a group may not learn whether all came, so the rule holds for the newest group that a member here was
/// connected in and for each later one that a member here has begun (dynamic voting: Yeger Lotem, Keidar, Dolev, 1997).
/// Two connected groups share a member that has begun both, one after the other: one of the same generation as the newest
/// was never connected.
///
/// "a", "b" and "c" were connected; "a" and "b" are half of the four members that "a" has begun to connect since, and "a"
/// has the lowest id. But "b" is one of the four and has not begun: it asks for another group now, so those four can
/// never have been connected, and only the three count.
pub(super) fn lacking(participants: &[&Participant]) -> Option<(usize, usize)> {
    let seats = || participants.iter().filter_map(|participant| participant.standing.seat.as_ref());
    let newest = seats().max_by_key(|seat| seat.generation);
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

/// How many of the newest connected group there are, and how many it had, if nobody here has the newest state that they
/// know of.
///
/// Members are connected before they have the state: one that was away counts for a group with those that went on without
/// it, and must not go on in their place if that group breaks before it has their state.
fn older(newest: Option<&Seat>, participants: &[&Participant]) -> Option<(usize, usize)> {
    let standings = || participants.iter().map(|participant| &participant.standing);
    let is_older =
        standings().map(|standing| standing.state).max() < standings().map(|standing| standing.known).max();
    is_older.then(|| match newest {
        Some(seat) => (participants.iter().filter(|each| has_begun(each, seat.epoch)).count(), seat.size),
        None => (participants.len(), participants.len()),
    })
}

/// The same for the newest group that a member here was connected in.
///
/// Members that leave on notice do not count for those who know that they left. Others cannot know, also the leavers
/// themselves: those who stay may have gone on without them. So a set with leavers needs more than half of the rest, too.
fn lacking_of_connected(newest: &Seat, participants: &[&Participant]) -> Option<(usize, usize)> {
    let seats = || {
        let seats = participants.iter().filter_map(|participant| participant.standing.seat.as_ref());
        seats.filter(|seat| seat.epoch == newest.epoch)
    };
    let found = participants.iter().filter(|participant| has_begun(participant, newest.epoch)).count();
    let has_first = seats().any(|seat| seat.is_first)
        || begun(participants).any(|(id, begun, epoch, _)| epoch == newest.epoch && is_first(begun, id));
    let leavers = seats().filter(|seat| seat.leaves).count();
    let stay = found - leavers;
    let left = seats().map(|seat| seat.left).max().unwrap_or(0);
    let needed = match left {
        0 => vec![(found, newest.size), (stay, newest.size.saturating_sub(leavers))],
        _ => vec![(stay, newest.size.saturating_sub(left))],
    };
    needed.into_iter().find(|&(found, size)| !is_enough(found, size, has_first))
}

/// All groups that members here have begun: the member's id, the group's members, its epoch and its generation.
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
    standing.seat.as_ref().is_some_and(|seat| seat.epoch == epoch)
        || standing.begun.iter().flat_map(|begun| &begun.groups).any(|&(begun, _)| begun == epoch)
}

fn is_first(begun: &Begun, id: &str) -> bool {
    begun.members.first().is_some_and(|first| first == id)
}

fn is_enough(found: usize, size: usize, has_first: bool) -> bool {
    2 * found > size || (2 * found == size && has_first)
}
