//! Membership: when a member asks the Lighthouse, and how it reacts to the answer.

use super::{MAX_RECOVERIES, Phase, Protocol};
use crate::protocol::agreement::{
    Agreement, Need, Verdict, awaits_absent, is_outdated, judge, without_idle_spares,
};
use crate::protocol::cut::reach_each_other;
use crate::protocol::event::{Begun, Command, LastGroup, Participant, Refused, Standing, Stop, Wait};
use crate::protocol::island::{incomplete, may_run_elsewhere, without_incomplete_islands};
use crate::protocol::version::{generation_of, step_of};
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

/// Maximum number of remembered runs of set numbers.
const MAX_NAMED: usize = 64;

impl Protocol {
    pub(super) fn look(&mut self, until: u64) -> Vec<Command> {
        self.until = until;
        if self.phase == Phase::Ready {
            return if self.is_called { vec![self.ask()] } else { self.look_around() };
        }
        if self.recoveries >= MAX_RECOVERIES {
            let reason = self.failure.clone();
            return self.stop(Stop::NoProgress { recoveries: self.recoveries, reason });
        }
        vec![self.ask()]
    }

    /// Continues in an intact group; first inquires or weighs if scheduled.
    fn look_around(&mut self) -> Vec<Command> {
        let is_due = step_of(self.version).is_multiple_of(self.settings.join_interval.max(1));
        if is_due { self.inquire_and_go_on() } else { vec![self.weigh_or_go_on()] }
    }

    /// Inquires for newcomers again, if a common question has ended the inquiry, and continues.
    fn inquire_and_go_on(&mut self) -> Vec<Command> {
        let mut commands = self.inquire();
        commands.push(self.weigh_or_go_on());
        commands
    }

    fn weigh_or_go_on(&mut self) -> Command {
        if !self.is_time_to_move() {
            return self.go_on();
        }
        self.phase = Phase::Weighing;
        Command::Weigh
    }

    fn is_time_to_move(&self) -> bool {
        let step = step_of(self.version);
        let every = self.settings.rebalance_interval;
        every > 0 && step > 0 && step < self.until && step.is_multiple_of(every)
    }

    pub(super) fn ask(&mut self) -> Command {
        self.phase = Phase::Asking;
        self.is_called = false;
        Command::Ask { standing: self.standing(), is_intact: self.group.is_some() }
    }

    pub(super) fn standing(&self) -> Standing {
        Standing {
            epoch: self.group.as_ref().map(|group| group.epoch),
            established: self.established,
            size: self.adopted.1,
            generation: self.generation,
            state: generation_of(self.version),
            has_progress: step_of(self.version) > 0,
            named: self.named.clone(),
            adopted: self.adopted.0,
            inquires: self.inquires,
            is_done: self.is_done,
            is_spare: self.is_spare,
            last_group: self.last_group.clone(),
            known: self.known,
            begun: self.begun.clone(),
        }
    }

    pub(super) fn retry(&mut self, reason: String) -> Vec<Command> {
        self.group = None;
        vec![Command::Drop { reason }, self.ask()]
    }

    /// Records that the Lighthouse has named this member in a set.
    fn note_named(&mut self, id: u64) {
        if self.named.last().is_some_and(|&(_, last)| id < last) {
            self.named.clear(); // the Lighthouse has lost its memory
        }
        if id <= self.adopted.0 {
            return;
        }
        match self.named.last_mut() {
            Some((_, last)) if id <= *last + 1 => *last = id,
            _ => self.named.push((id, id)),
        }
        if self.named.len() > MAX_NAMED {
            self.named.remove(0);
        }
    }

    /// As [`note_named`](Self::note_named), unless this member is left out with its island.
    pub(super) fn note_refused(&mut self, set: Option<Refused>) {
        if let Some(set) = set.filter(|set| incomplete(&set.participants, &self.settings.id).is_none()) {
            self.note_named(set.id);
        }
    }

    /// The members of a set that count: complete islands, and no idle spares.
    fn counted(&self, participants: &[Participant]) -> Vec<Participant> {
        without_idle_spares(&without_incomplete_islands(participants), self.settings.members)
    }

    fn note_spares(&mut self, participants: &[Participant]) {
        self.knows_spares = participants.iter().any(|each| each.standing.is_spare);
    }

    fn note_adopted(&mut self, id: u64) {
        self.adopted.0 = id;
        self.named.clear();
    }

    pub(super) fn inquire(&mut self) -> Vec<Command> {
        if self.settings.join_interval == 0 || step_of(self.version) >= self.until {
            return vec![];
        }
        self.inquires = true;
        vec![Command::Inquire { standing: self.standing() }]
    }

    /// No member acts on such an answer alone: the vote informs all members that one has seen newcomers, and they ask
    /// together.
    pub(super) fn overhear(
        &mut self,
        id: u64,
        participants: &[Participant],
        is_refused: bool,
    ) -> Vec<Command> {
        if incomplete(participants, &self.settings.id).is_some() {
            return vec![]; // others may continue in this set
        }
        self.note_named(id);
        if is_refused {
            return vec![];
        }
        self.note_spares(participants);
        let participants = &self.counted(participants)[..];
        if let Some(group) = &self.group {
            let found =
                participants.iter().filter(|participant| group.members.contains(&participant.id)).count();
            let is_as_before = |participant: &Participant| participant.standing.epoch == Some(group.epoch);
            if found == group.members.len() {
                let in_reach = reach_each_other(participants);
                self.calls |= in_reach.iter().any(|id| !group.members.iter().any(|member| member == id));
                if participants.iter().all(is_as_before) {
                    self.note_adopted(id);
                }
            }
        }
        vec![]
    }

    /// All members have connected to the group. Before that, some may have continued in an intact group without this
    /// set.
    pub(super) fn connected(&mut self) {
        self.note_adopted(self.connecting);
        self.has_withdrawn = false;
        let Some(group) = &self.group else { return };
        self.adopted.1 = group.members.len();
        self.begun.clear();
        self.last_group = self.settings.needs_majority.then(|| LastGroup {
            epoch: group.epoch,
            generation: group.generation,
            size: group.members.len(),
            is_first: group.members.iter().min() == Some(&self.settings.id),
            leaves: false,
            left: 0,
        });
    }

    pub(super) fn compare(&mut self, heard: Option<(u64, Vec<Participant>)>) -> Vec<Command> {
        self.phase = Phase::Comparing;
        let set = heard.as_ref().map(|(id, participants)| digest(*id, participants));
        self.heard = heard;
        vec![Command::Compare { set }]
    }

    /// An intact group continues unchanged unless all its members have received the same answer.
    pub(super) fn compared(&mut self, sets: &[Option<u64>]) -> Vec<Command> {
        let heard = self.heard.take();
        match heard {
            Some((id, participants)) if sets.iter().all(|&set| set == sets[0]) => {
                self.judge(id, &participants, false)
            }
            heard => {
                if let Some((id, _)) = heard {
                    self.note_named(id);
                }
                // This replaces the inquiry that the Lighthouse may not have answered yet.
                self.inquire_and_go_on()
            }
        }
    }

    pub(super) fn judge(&mut self, id: u64, participants: &[Participant], is_promoted: bool) -> Vec<Command> {
        self.inquires = false;
        self.saw_progress |=
            participants.iter().any(|each| each.standing.established && each.standing.has_progress);
        self.note_spares(participants);
        if self.is_spare && participants.iter().any(|each| each.standing.is_done && !each.waits) {
            return self.stop(Stop::Finished);
        }
        if let Some((found, size)) = incomplete(participants, &self.settings.id) {
            return self.left_out(found, size, participants);
        }
        let (all, participants) = (participants, &self.counted(participants)[..]);
        if self.is_spare && participants.iter().all(|each| each.id != self.settings.id) {
            // Others may continue in this set without this member, so it cannot vouch for their steps.
            return self.wait(Wait::Spare);
        }
        self.note_named(id);
        if self.group.is_none() && may_run_elsewhere(all) {
            return self.wait(if self.established { Wait::Unheard } else { Wait::Training });
        }
        let is_left_out = |id: &String| participants.iter().all(|each| each.id != *id);
        if self.group.as_ref().is_some_and(|group| group.members.iter().any(is_left_out)) {
            return self.inquire_and_go_on(); // all answers are the same: another process claims a position
        }
        let need = Need {
            members: self.settings.members,
            is_always: self.settings.is_fixed,
            allows_solo_resume: self.settings.allows_solo_resume
                || (is_promoted && self.settings.needs_majority),
            is_majority: self.settings.needs_majority,
        };
        let group = self.group.as_ref().map(|group| (&group.members[..], group.epoch));
        match judge(id, participants, need, group) {
            Verdict::Unchanged => {
                self.note_adopted(id);
                self.inquire_and_go_on()
            }
            Verdict::New(agreement) => self.adopt(id, agreement),
            _ if self.group.is_some() => self.inquire_and_go_on(),
            Verdict::Wait(Wait::Minority { .. }) if self.is_done => self.close(), // the others have finished, or will
            Verdict::Wait(Wait::Minority { .. }) if self.all_left() => {
                self.phase = Phase::Over;
                vec![Command::Leave]
            }
            Verdict::Wait(why) => self.wait(why),
            Verdict::Cut(stay) if stay.contains(&self.settings.id) => self.wait(Wait::Cut),
            Verdict::Cut(_) => {
                self.has_withdrawn = true;
                self.phase = Phase::Waiting;
                vec![Command::Withdraw]
            }
            Verdict::LeftBehind { .. } if self.is_done => self.close(), // the others have informed spares of the end
            Verdict::LeftBehind { adopted } if self.adopted.0 > 0 => {
                self.stop(Stop::LeftBehind { adopted, id })
            }
            Verdict::LeftBehind { .. } => self.wait(Wait::LeftBehind),
        }
    }

    /// Others may continue in this set without this member and its island.
    fn left_out(&mut self, found: usize, size: usize, participants: &[Participant]) -> Vec<Command> {
        if self.group.is_some() {
            return self.inquire_and_go_on(); // as the rest of the group
        }
        if self.is_done {
            return self.close();
        }
        if !self.established || self.has_withdrawn {
            return self.wait(Wait::Island { found, size });
        }
        if awaits_absent(participants) {
            return self.wait(Wait::Absent);
        }
        if participants.iter().any(|each| is_outdated(each, participants)) {
            return self.wait(Wait::Unheard); // the Lighthouse may not have waited for the rest of the island
        }
        self.stop(Stop::IslandLost { found, size })
    }

    /// Whether this member and all others have announced their departure: no member continues, and some are gone.
    fn all_left(&self) -> bool {
        self.last_group
            .as_ref()
            .is_some_and(|last_group| last_group.leaves && last_group.left == last_group.size)
    }

    fn note_begun(&mut self, agreement: &Agreement) {
        let Agreement { epoch, generation, .. } = *agreement;
        let mut members = agreement.members.clone();
        members.sort();
        let group = (epoch, generation);
        match self.begun.iter_mut().find(|begun| begun.members == members) {
            Some(begun) => begun.groups.push(group),
            None => self.begun.push(Begun { members, groups: vec![group] }),
        }
    }

    pub(super) fn wait(&mut self, why: Wait) -> Vec<Command> {
        self.phase = Phase::Waiting;
        vec![Command::Wait(why)]
    }

    fn adopt(&mut self, id: u64, agreement: Agreement) -> Vec<Command> {
        let Agreement { epoch, generation, members, num_trainers, newest } = agreement.clone();
        self.connecting = id;
        self.generation = generation;
        if self.settings.needs_majority {
            self.note_begun(&agreement);
            self.known = self.known.max(newest);
        }
        self.group = Some(agreement);
        self.is_spare = false;
        self.phase = Phase::Connecting;
        vec![Command::Connect { epoch, generation, members, num_trainers }]
    }
}

/// Digest that distinguishes answers of the Lighthouse.
fn digest(id: u64, participants: &[Participant]) -> u64 {
    let mut hasher = Xxh3::new();
    (id, participants).hash(&mut hasher);
    hasher.finish()
}
