//! What a set that the Lighthouse names means for one of its members: the same on all of them.

use super::cut::who_stays;
use super::event::{Participant, Standing, Wait};
use super::majority::lacking;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

/// The answer of [`judge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Ask again.
    Wait(Wait),
    /// All members here agreed before, and others have gone on without them since.
    LeftBehind {
        /// Number of the newest set that a member here has adopted.
        adopted: u64,
    },
    /// Some members cannot reach each other, or are behind others that have come to the end: these ids go on once all others
    /// have withdrawn.
    Cut(BTreeSet<String>),
    /// The group that all are connected in is still right.
    Unchanged,
    /// A new group.
    New(Agreement),
}

/// Who takes part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Agreement {
    /// Names the group.
    pub epoch: u64,
    /// Larger than that of any member's before.
    pub generation: u64,
    /// By rank.
    pub members: Vec<String>,
    /// How many of them train; theirs are the first ranks.
    pub num_trainers: usize,
    /// Newest state of them.
    pub newest: u64,
}

/// How many members a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Members that train.
    pub members: usize,
    /// Whether they are needed always, not only to begin.
    pub is_always: bool,
    /// Whether members that were left behind go on all the same: their operator has said that nobody else does.
    pub goes_on_alone: bool,
    /// Whether the job has several Lighthouses, each of which may name a set: only a majority goes on then.
    pub is_majority: bool,
}

/// Judges the set `participants`, which the Lighthouse has given the number `id`.
///
/// `group` is the ids and the epoch of the group that this member is connected in.
///
/// A member that slept while others agreed must not go on: they may have committed steps that it does not know. The
/// Lighthouse numbers its sets, and nothing happens under a set without all of its members. So this set is safe if each
/// set since the newest that was adopted here has named a member of this one, or if all members of that newest one are
/// here. A Lighthouse that has lost its memory counts from 1 again: a number below those seen says nothing.
///
/// Where the job has several Lighthouses, their numbers say nothing about each other: only a set that holds a majority
/// of the last group goes on (see `majority.rs`), whichever of them names it.
///
/// Members "a" and "b" agreed in set 3. While "b" slept, "a" went on alone in set 4 and died. "b" wakes up in set 5:
/// ```
/// use evermoe::protocol::{Need, Participant, Standing, Verdict, judge};
/// let standing = Standing {
///     epoch: None, established: true, size: 2, generation: 3, state: 3, has_progress: true, named: vec![], adopted: 3,
///     inquires: false, is_done: false, is_spare: false, seat: None, known: 0, begun: vec![],
/// };
/// let b = Participant {
///     id: "b".into(), rank_key: "".into(), trains: true, waits: true, is_patient: false, unreachable: vec![], standing,
/// };
/// let need = Need { members: 2, is_always: false, goes_on_alone: false, is_majority: false };
/// assert_eq!(judge(5, &[b.clone()], need, None), Verdict::LeftBehind { adopted: 3 });
/// assert!(matches!(judge(4, &[b], need, None), Verdict::New(_))); // "a" is gone, and nothing has happened since
/// ```
pub fn judge(id: u64, participants: &[Participant], need: Need, group: Option<(&[String], u64)>) -> Verdict {
    let standings = || participants.iter().map(|participant| &participant.standing);
    // Before all else: who waits here is named in this set, and would pass for one who was not left behind in the next.
    if let Some(adopted) = slept(id, standings()).filter(|_| !need.goes_on_alone && !need.is_majority) {
        let is_sure = !standings().any(|standing| standing.inquires);
        return if is_sure { Verdict::LeftBehind { adopted } } else { Verdict::Wait(Wait::Unheard) };
    }
    if let Some(stay) = at_the_end(participants) {
        return Verdict::Cut(stay);
    }
    if participants.iter().any(|participant| is_outdated(participant, participants)) {
        return Verdict::Wait(Wait::Unheard);
    }
    let stay = who_stays(participants, need.is_majority);
    if !participants.iter().all(|participant| stay.contains(participant.id.as_str())) {
        return Verdict::Cut(stay.into_iter().map(str::to_owned).collect());
    }
    if participants.iter().any(|participant| !participant.waits) {
        return Verdict::Wait(Wait::Training);
    }
    let found = participants.iter().filter(|participant| participant.trains).count();
    let is_running = standings().any(|standing| standing.established);
    let needed = if is_running && !need.is_always { 1 } else { need.members };
    if found < needed {
        return Verdict::Wait(Wait::Members { found, needed });
    }
    if awaits_absent(participants) {
        return Verdict::Wait(Wait::Absent);
    }
    let all: Vec<&Participant> = participants.iter().collect();
    if let Some((found, size)) = lacking(&all).filter(|_| need.is_majority && !need.goes_on_alone) {
        return Verdict::Wait(Wait::Minority { found, size });
    }
    let mut ordered: Vec<&Participant> = participants.iter().collect();
    ordered.sort_by_key(|participant| (!participant.trains, &participant.rank_key, &participant.id));
    let members: Vec<String> = ordered.iter().map(|participant| participant.id.clone()).collect();
    if let Some((ids, epoch)) = group
        && ids == members
        && standings().all(|standing| standing.epoch == Some(epoch))
    {
        return Verdict::Unchanged;
    }
    let generation = 1 + standings().map(|standing| standing.generation).max().unwrap_or(0);
    let newest = standings().map(|standing| standing.state).max().unwrap_or(0);
    let epoch = name(&members, generation, need.is_majority.then_some(participants));
    Verdict::New(Agreement { epoch, generation, members, num_trainers: found, newest })
}

/// The participants without the spares that are not needed: of the spares, in the order of their ids, as many count as members
/// that train are missing. The same on all members. In a job that has not begun they leave the others time to come: those that
/// are patient do not count.
///
/// Three are to train, and "a" and "b" do: of the spares "d" and "c" only "c" counts.
/// ```
/// use evermoe::protocol::{Participant, Settings, Standing, without_idle_spares};
/// let standing = |is_spare: bool| Standing {
///     epoch: None, established: !is_spare, size: 0, generation: 0, state: 0, has_progress: false, named: vec![], adopted: 0,
///     inquires: false, is_done: false, is_spare, seat: None, known: 0, begun: vec![],
/// };
/// let participant = |id: &str, is_spare| Participant {
///     id: id.into(), rank_key: "".into(), trains: true, waits: true, is_patient: false, unreachable: vec![],
///     standing: standing(is_spare),
/// };
/// let all = [participant("d", true), participant("a", false), participant("c", true), participant("b", false)];
/// let found: Vec<_> = without_idle_spares(&all, 3).into_iter().map(|each| each.id).collect();
/// assert_eq!(found, ["a", "c", "b"]);
/// ```
pub fn without_idle_spares(participants: &[Participant], members: usize) -> Vec<Participant> {
    let is_spare = |participant: &&Participant| participant.standing.is_spare;
    let is_running = participants.iter().any(|participant| participant.standing.established);
    let training = participants.iter().filter(|each| each.trains && !is_spare(each)).count();
    let may_come = participants.iter().filter(is_spare).filter(|each| is_running || !each.is_patient);
    let mut spares: Vec<&str> = may_come.map(|each| each.id.as_str()).collect();
    spares.sort_unstable();
    spares.truncate(members.saturating_sub(training));
    let counts = |each: &&Participant| !is_spare(each) || spares.binary_search(&each.id.as_str()).is_ok();
    participants.iter().filter(counts).cloned().collect()
}

/// The members without those that have an older state than one that has come to the end, if there are such.
///
/// They were not in its last group, or would have its state. It may miss what others have taken along that are through;
/// together they might have all of an older state, and undo the last steps with it.
fn at_the_end(participants: &[Participant]) -> Option<BTreeSet<String>> {
    let standings = participants.iter().map(|participant| &participant.standing);
    let end = standings.filter(|standing| standing.is_done).map(|standing| standing.state).max()?;
    let is_behind =
        |participant: &&Participant| participant.standing.established && participant.standing.state < end;
    let stay: BTreeSet<String> =
        participants.iter().filter(|each| !is_behind(each)).map(|each| each.id.clone()).collect();
    (stay.len() < participants.len()).then_some(stay)
}

/// Whether what a member has told is older than the end of its group: it asked while it trained, and another one that
/// knows the group waits outside of it.
///
/// It may be dead: then the others do not reach it, and nobody may withdraw in favour of it. Else it will ask again.
fn is_outdated(participant: &Participant, participants: &[Participant]) -> bool {
    let standing = &participant.standing;
    let has_left = |other: &Participant| {
        other.waits
            && other.standing.established
            && other.standing.epoch.is_none()
            && other.standing.generation >= standing.generation
    };
    !participant.waits && standing.epoch.is_some() && participants.iter().any(has_left)
}

/// Whether some established members may be absent and those that are here still give them time: all established ones, or
/// one of those that would begin a new job.
fn awaits_absent(participants: &[Participant]) -> bool {
    let established = || participants.iter().filter(|participant| participant.standing.established);
    let size = established().map(|participant| participant.standing.size).max().unwrap_or(0);
    if established().next().is_none() {
        return participants.iter().any(|participant| participant.is_patient);
    }
    size > established().count() && established().all(|participant| participant.is_patient)
}

/// Number of the newest set that was adopted by a member here, if others may have gone on since.
fn slept<'a>(id: u64, standings: impl Iterator<Item = &'a Standing> + Clone) -> Option<u64> {
    let newest =
        standings.clone().filter(|standing| standing.adopted > 0).max_by_key(|standing| standing.adopted)?;
    let is_known = |number: u64| {
        standings
            .clone()
            .any(|standing| standing.named.iter().any(|&(first, last)| (first..=last).contains(&number)))
    };
    let is_whole =
        standings.clone().filter(|standing| standing.adopted == newest.adopted).count() >= newest.size;
    (!is_whole && !(newest.adopted + 1..id).all(is_known)).then_some(newest.adopted)
}

/// A name that members who agree on the same set and generation share, and nobody else.
///
/// Where it counts who was in which group, they agree on that, too: what a member told before a vote and after it might
/// each give it to another half.
fn name(members: &[String], generation: u64, told: Option<&[Participant]>) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.write_u64(generation);
    for standing in told.into_iter().flatten().map(|participant| &participant.standing) {
        (&standing.seat, standing.known, &standing.begun).hash(&mut hasher);
    }
    for member in members {
        hasher.write(member.as_bytes());
        hasher.write_u8(0);
    }
    hasher.finish()
}
