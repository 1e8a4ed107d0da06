//! Membership: survivors, spares and newcomers.

use super::account::{Cause, nanoseconds};
use super::job::Job;
use super::member::participant;
use super::units::RankUnits;
use super::world::Flow;
use crate::error::Result;
use crate::protocol::{Event, Participant, Standing, without_idle_spares};

impl Job<'_> {
    /// Answers as the Lighthouse.
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
        let (rank_units, vacated) = std::mem::take(&mut self.rank_units)
            .into_iter()
            .partition(|own_units| self.world.members[own_units.node]);
        self.rank_units = rank_units;
        self.vacated.extend::<Vec<RankUnits>>(vacated);
        let newcomers = self.newcomers(&stay);
        self.agreed = stay.iter().copied().chain(newcomers.iter().copied()).collect();
        self.agreed.sort_unstable();
        self.world.set_members(&self.agreed);
        let has_newcomers = !newcomers.is_empty() && !stay.is_empty();
        self.members.answer(standing, is_intact, has_newcomers).map(Some)
    }

    /// Surviving members, by rank.
    fn survivors(&self) -> Vec<usize> {
        self.rank_units
            .iter()
            .map(|own_units| own_units.node)
            .filter(|&node| self.world.members[node])
            .collect()
    }

    /// Nodes that join the members `stay` (in ascending order), in the order of their ids, by the protocol's rule for
    /// spares.
    pub(super) fn newcomers(&self, stay: &[usize]) -> Vec<usize> {
        let is_ready =
            |node: &&usize| stay.binary_search(node).is_err() && !self.world.leaving.contains(node);
        let free = self.scenario.cluster.nodes.saturating_sub(stay.len());
        if free == 0 {
            return Vec::new();
        }
        let mut participants: Vec<Participant> =
            self.world.up.iter().filter(is_ready).map(|node| member(&format!("{node:07}"), true)).collect();
        // One participant stands for all survivors, on both sides of the difference.
        participants.extend((!stay.is_empty()).then(|| member("left", false)));
        let wanted = free + usize::from(!stay.is_empty());
        let chosen = without_idle_spares(&participants, wanted);
        chosen.iter().filter_map(|participant| participant.id.parse().ok()).collect()
    }

    /// Waits until there are enough nodes for all experts; false if the simulated time ends first.
    fn await_enough(&mut self) -> Result<bool> {
        let fewest =
            self.scenario.session.most_slots.map_or(1, |most| self.engine.units().experts.div_ceil(most));
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

/// Report of a process that has just started, or of a member.
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
        last_group: None,
        known: 0,
        begun: Vec::new(),
    }
}
