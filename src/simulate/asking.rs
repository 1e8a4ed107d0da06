//! Who takes part: the members that are left, spares, and newcomers.

use super::account::{Cause, nanoseconds};
use super::job::Job;
use super::member::participant;
use super::units::Seat;
use super::world::Flow;
use crate::error::Result;
use crate::protocol::{Event, Participant, Standing, without_idle_spares};

impl Job<'_> {
    /// The Lighthouse answers.
    pub(super) fn ask(&mut self, standing: Standing, is_intact: bool) -> Result<Option<Event>> {
        let agree = nanoseconds(self.scenario.costs.agree_seconds);
        if self.world.spend(Cause::Agree, agree)? == Flow::Lost && is_intact {
            return self.lost().map(Some);
        }
        if !self.await_enough()? {
            return Ok(None);
        }
        let stay = self.survivors();
        if stay.is_empty() && self.members.is_established() {
            self.forget_members();
            return Ok(Some(Event::Look { until: self.scenario.until() }));
        }
        let (seats, vacated) =
            std::mem::take(&mut self.seats).into_iter().partition(|seat| self.world.members[seat.node]);
        self.seats = seats;
        self.vacated.extend::<Vec<Seat>>(vacated);
        let newcomers = self.newcomers(&stay);
        self.agreed = stay.iter().copied().chain(newcomers.iter().copied()).collect();
        self.agreed.sort_unstable();
        self.world.set_members(&self.agreed);
        let has_newcomers = !newcomers.is_empty() && !stay.is_empty();
        self.members.answer(standing, is_intact, has_newcomers).map(Some)
    }

    /// Members that are left, by rank.
    fn survivors(&self) -> Vec<usize> {
        self.seats.iter().map(|seat| seat.node).filter(|&node| self.world.members[node]).collect()
    }

    /// Nodes that come to these, which ascend, in the order of their ids, as the protocol says of spares.
    pub(super) fn newcomers(&self, stay: &[usize]) -> Vec<usize> {
        let is_ready =
            |node: &&usize| stay.binary_search(node).is_err() && !self.world.leaving.contains(node);
        let free = self.scenario.cluster.nodes.saturating_sub(stay.len());
        if free == 0 {
            return Vec::new();
        }
        let mut participants: Vec<Participant> =
            self.world.up.iter().filter(is_ready).map(|node| member(&format!("{node:07}"), true)).collect();
        // One stands for all that are left, on both sides of the difference.
        participants.extend((!stay.is_empty()).then(|| member("left", false)));
        let wanted = free + usize::from(!stay.is_empty());
        let chosen = without_idle_spares(&participants, wanted);
        chosen.iter().filter_map(|participant| participant.id.parse().ok()).collect()
    }

    /// Waits until there are nodes enough for all experts; false where the simulated time is over before.
    fn await_enough(&mut self) -> Result<bool> {
        let fewest = self.scenario.session.most_slots.map_or(1, |most| self.units.experts.div_ceil(most));
        while self.world.up.len().min(self.scenario.cluster.nodes) < fewest {
            if self.world.await_change(Cause::Wait)? == Flow::Over {
                return Ok(false);
            }
        }
        Ok(!self.world.is_over())
    }
}

fn member(id: &str, is_spare: bool) -> Participant {
    participant(id, standing(is_spare), true)
}

/// What a process tells that has just started, or is a member.
fn standing(is_spare: bool) -> Standing {
    Standing {
        epoch: None,
        established: !is_spare,
        size: 0,
        generation: 0,
        state: 0,
        has_progress: false,
        named: Vec::new(),
        adopted: 0,
        inquires: false,
        is_done: false,
        is_spare,
        seat: None,
        known: 0,
        begun: Vec::new(),
    }
}
