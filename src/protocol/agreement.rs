//! Judgement of a set that the Lighthouse names; all of its members reach the same verdict.

use super::cut::who_stays;
use super::event::{Participant, Standing, Wait};
use super::majority::lacking;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

/// The verdict of [`judge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Ask again.
    Wait(Wait),
    /// All members here agreed earlier, and others have continued without them since.
    LeftBehind {
        /// Number of the newest set that a member here has adopted.
        adopted: u64,
    },
    /// Some members cannot reach each other, or are behind others that have finished. The members with these ids
    /// continue once all others have withdrawn.
    Cut(BTreeSet<String>),
    /// The connected group is still valid.
    Unchanged,
    /// The members form a new group.
    New(Agreement),
}

/// The members of a group and its identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Agreement {
    /// Unique name of the group.
    pub epoch: u64,
    /// Generation of the group; larger than any of its members had.
    pub generation: u64,
    /// Ids of the members by rank.
    pub members: Vec<String>,
    /// Number of members that train; they have the first ranks.
    pub num_trainers: usize,
    /// Newest state that any member has.
    pub newest: u64,
}

/// Number of members that a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Number of training members.
    pub members: usize,
    /// Whether that number is needed throughout the job, not only to begin.
    pub is_always: bool,
    /// Whether members that were left behind may continue: the operator has declared that no other members do.
    pub allows_solo_resume: bool,
    /// Whether the job has several Lighthouses, each of which may name a set: then only a majority continues.
    pub is_majority: bool,
}

/// Judges the set `participants`, to which the Lighthouse has given the number `id`.
///
/// `group` holds the ids and the epoch of the group that this member is connected in.
///
/// A member that slept while others agreed must not continue: they may have committed steps that it does not know. The
/// Lighthouse numbers its sets, and nothing happens under a set without all of its members. So this set is safe in two
/// cases: each set since the newest one adopted here has named a member of this set, or all members of that newest set
/// are present. A Lighthouse that has lost its memory counts from 1 again, so a number below those seen proves nothing.
///
/// With several Lighthouses, their numbers are unrelated. Then only a set that holds a majority of the last group
/// continues, whichever Lighthouse names it (see `majority.rs`).
///
/// Members "a" and "b" agreed in set 3. While "b" slept, "a" continued alone in set 4 and died. "b" wakes up in set 5:
/// ```
/// use evermoe::protocol::{Need, Participant, Standing, Verdict, judge};
/// let standing = Standing {
///     epoch: None, established: true, size: 2, generation: 3, state: 3, has_progress: true, named: vec![], adopted: 3,
///     inquires: false, is_done: false, is_spare: false, last_group: None, known: 0, begun: vec![],
/// };
/// let b = Participant {
///     id: "b".into(), rank_key: "".into(), island: None, trains: true, waits: true, is_patient: false, unreachable: vec![], standing,
/// };
/// let need = Need { members: 2, is_always: false, allows_solo_resume: false, is_majority: false };
/// assert_eq!(judge(5, &[b.clone()], need, None), Verdict::LeftBehind { adopted: 3 });
/// assert!(matches!(judge(4, &[b], need, None), Verdict::New(_))); // "a" is gone, and nothing has happened since
/// ```
pub fn judge(id: u64, participants: &[Participant], need: Need, group: Option<(&[String], u64)>) -> Verdict {
    let standings = || participants.iter().map(|participant| &participant.standing);
    // First of all: a member that waits is named in this set, so in the next one it would not count as left behind.
    if let Some(adopted) = slept(id, standings()).filter(|_| !need.allows_solo_resume && !need.is_majority) {
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
    if let Some((found, size)) = lacking(&all).filter(|_| need.is_majority && !need.allows_solo_resume) {
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

/// Returns the participants without the spares that are not needed; the result is the same on all members. The spares
/// with the lowest ids fill the places of missing training members. In a job that has not begun, patient spares do not
/// count, so that the others have time to arrive.
///
/// Three members should train, "a" and "b" do: of the spares "d" and "c" only "c" counts.
/// ```
/// use evermoe::protocol::{Participant, Settings, Standing, without_idle_spares};
/// let standing = |is_spare: bool| Standing {
///     epoch: None, established: !is_spare, size: 0, generation: 0, state: 0, has_progress: false, named: vec![], adopted: 0,
///     inquires: false, is_done: false, is_spare, last_group: None, known: 0, begun: vec![],
/// };
/// let participant = |id: &str, is_spare| Participant {
///     id: id.into(), rank_key: "".into(), island: None, trains: true, waits: true, is_patient: false, unreachable: vec![],
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

/// If some members have finished: the members whose state is as new as theirs.
///
/// The others were not in the last group, or they would have its state. A finished member may lack what members that
/// have left took with them. Together, the others might hold a complete older state and undo the last steps with it.
fn at_the_end(participants: &[Participant]) -> Option<BTreeSet<String>> {
    let standings = participants.iter().map(|participant| &participant.standing);
    let end = standings.filter(|standing| standing.is_done).map(|standing| standing.state).max()?;
    let is_behind =
        |participant: &&Participant| participant.standing.established && participant.standing.state < end;
    let stay: BTreeSet<String> =
        participants.iter().filter(|each| !is_behind(each)).map(|each| each.id.clone()).collect();
    (stay.len() < participants.len()).then_some(stay)
}

/// Whether a member's report is older than the end of its group: it asked while it trained, and another member of that
/// group now waits outside of it.
///
/// That member may be dead. If so, the others do not reach it, and nobody may withdraw in its favour. If not, it will
/// ask again.
pub(super) fn is_outdated(participant: &Participant, participants: &[Participant]) -> bool {
    let standing = &participant.standing;
    let has_left = |other: &Participant| {
        other.waits
            && other.standing.established
            && other.standing.epoch.is_none()
            && other.standing.generation >= standing.generation
    };
    !participant.waits && standing.epoch.is_some() && participants.iter().any(has_left)
}

/// Whether some established members may be absent and those present still give them time: all established members do,
/// or one of those that would begin a new job.
pub(super) fn awaits_absent(participants: &[Participant]) -> bool {
    let established = || participants.iter().filter(|participant| participant.standing.established);
    let size = established().map(|participant| participant.standing.size).max().unwrap_or(0);
    if established().next().is_none() {
        return participants.iter().any(|participant| participant.is_patient);
    }
    size > established().count() && established().all(|participant| participant.is_patient)
}

/// Number of the newest set that a present member has adopted, if others may have continued since.
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

/// Name that is shared by members who agree on the same set and generation, and by no others.
///
/// Where past groups count, the members must agree on those as well: a member's reports before and after a vote might
/// each reach a different half.
fn name(members: &[String], generation: u64, told: Option<&[Participant]>) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.write_u64(generation);
    for standing in told.into_iter().flatten().map(|participant| &participant.standing) {
        (&standing.last_group, standing.known, &standing.begun).hash(&mut hasher);
    }
    for member in members {
        hasher.write(member.as_bytes());
        hasher.write_u8(0);
    }
    hasher.finish()
}
