//! A step: its duration, its delays, and the saves during it.

use super::account::{Cause, nanoseconds, seconds};
use super::job::Job;
use super::world::Flow;
use crate::error::Result;
use crate::protocol::Event;

impl Job<'_> {
    /// Seconds of a step of the current members without delays.
    pub(super) fn step_seconds(&self) -> f64 {
        let model = &self.scenario.model;
        let share =
            (self.scenario.cluster.nodes as f64 / self.rank_units.len().max(1) as f64).powf(model.scaling);
        let uneven = 1.0 - model.expert_share + model.expert_share * self.pace.imbalance;
        model.step_seconds * share * uneven
    }

    /// Computes a step and everything that must be safe before the vote.
    pub(super) fn step(&mut self, number: u64) -> Result<Event> {
        self.loads.advance(number);
        self.engine.begin_step()?;
        let compute = nanoseconds(self.step_seconds());
        let (began, slower) = (self.world.now, self.world.slowness() - 1.0);
        let flow = self.world.spend_step(Cause::Train, compute, number)?;
        if flow != Flow::Done {
            return self.interrupted(flow, self.world.now - began);
        }
        let (late, first_copies) = self.overlapped(compute);
        let persisting = nanoseconds(std::mem::take(&mut self.pace.persisting));
        let delays = [
            (Cause::Straggle, nanoseconds(seconds(compute) * slower)),
            (Cause::Copy, nanoseconds(self.pace.copies.delay_seconds)),
            (Cause::Fetch, late),
            (Cause::Protect, first_copies),
            (Cause::Checkpoint, persisting + self.save(number, compute)?),
        ];
        for (cause, delay) in delays.into_iter().filter(|(_, delay)| *delay > 0) {
            let flow = self.world.spend(cause, delay)?;
            if flow != Flow::Done {
                return self.interrupted(flow, compute);
            }
        }
        (self.pace.late_state, self.pace.first_copies) = (0.0, 0.0);
        self.pace.computing = compute;
        self.tally.copy_bytes += u128::from(self.pace.copies.bytes);
        self.look_for_newcomers()?;
        Ok(Event::Gradients { is_whole: true, leaves: false, lag: 0 })
    }

    /// Accounts for a step that a loss, or the end of the simulated time, interrupted after `computed` nanoseconds.
    fn interrupted(&mut self, flow: Flow, computed: u64) -> Result<Event> {
        self.world.spent.move_to_repeat(computed);
        self.tally.interrupted_steps += u64::from(flow == Flow::Lost);
        self.unless_lost(flow, Event::Waited)
    }

    /// Excess nanoseconds of optimizer state, and then of the first copies. Both are sent during the step while the
    /// network is idle, and the vote waits for them.
    fn overlapped(&self, compute: u64) -> (u64, u64) {
        let idle = seconds(compute) * self.scenario.model.network_idle;
        let late = self.pace.late_state;
        let first = (self.pace.first_copies - (idle - late).max(0.0)).max(0.0);
        (nanoseconds((late - idle).max(0.0)), nanoseconds(first))
    }

    fn look_for_newcomers(&mut self) -> Result<()> {
        let is_full = self.rank_units.len() >= self.scenario.cluster.nodes;
        let is_alone = self.world.up.len() <= self.rank_units.len();
        if is_full || is_alone || self.scenario.session.join_interval == 0 {
            return Ok(());
        }
        let stay: Vec<usize> = self.rank_units.iter().map(|own_units| own_units.node).collect();
        if self.newcomers(&stay).is_empty() { Ok(()) } else { self.members.overhear_newcomers() }
    }

    /// Writes checkpoints and selected experts if scheduled; returns the nanoseconds for which the step waits.
    fn save(&mut self, number: u64, compute: u64) -> Result<u64> {
        self.finish_writing();
        let every = self.scenario.session.checkpoint_interval;
        let is_due = every > 0 && number > 0 && number.is_multiple_of(every);
        if !is_due || self.writing.is_some() || self.preset.needs_checkpoint_dir {
            return Ok(0);
        }
        let (costs, bytes) = (&self.scenario.costs, self.bytes_per_node());
        let write = costs.write(bytes, self.rank_units.len());
        let capture = nanoseconds(bytes / costs.capture_bytes_per_second);
        let stall = capture.saturating_sub(compute) + nanoseconds(costs.persist_seconds);
        self.writing = Some((self.engine.history().newest, self.world.now + stall + nanoseconds(write)));
        self.tally.store_bytes += u128::from(self.engine.units().bytes.iter().sum::<u64>());
        Ok(stall)
    }

    /// Abandons the saves in progress, as a lost member's part of them is lost with it.
    pub(super) fn abandon_writing(&mut self) {
        self.finish_writing();
        self.writing = None;
        self.finish_save();
        self.saving_until = None;
        self.engine.end_save(false);
    }

    /// Ends the save of a few experts if it is complete by now.
    fn finish_save(&mut self) {
        if self.saving_until.take_if(|until| *until <= self.world.now).is_some() {
            self.engine.end_save(true);
        }
    }

    pub(super) fn finish_writing(&mut self) {
        if let Some((version, _)) = self.writing.filter(|&(_, complete)| complete <= self.world.now) {
            self.stored = Some(version);
            self.writing = None;
        }
    }

    /// Bytes of the complete state per node: each unit is written by one of its holders.
    fn bytes_per_node(&self) -> f64 {
        self.engine.units().bytes.iter().sum::<u64>() as f64 / self.rank_units.len().max(1) as f64
    }

    /// Copies experts in turn after a step.
    pub(super) fn taken_step(&mut self, version: u64) -> Result<()> {
        self.finish_save();
        let (loads, tokens) = (&self.loads, self.scenario.model.tokens_per_step as f64);
        let counts = || loads.shares().iter().map(|share| (share * tokens).round() as i64).collect();
        let made = self.engine.take_step(version, counts)?;
        self.tally.store_bytes += u128::from(made.store_bytes);
        self.tally.copy_bytes += u128::from(made.peer_bytes);
        if made.store_bytes > 0 {
            let nodes = self.rank_units.len().max(1);
            let write = self.scenario.costs.write(made.store_bytes as f64 / nodes as f64, nodes);
            self.saving_until = Some(self.world.now + nanoseconds(write));
            self.pace.persisting = self.scenario.costs.persist_seconds;
        }
        Ok(())
    }
}
