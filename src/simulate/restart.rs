//! The usual practice: checkpoints from which all restart, with fixed groups of nodes that share the experts.
//!
//! These are the baselines of Lazarus (section 6.1): "DS" stops and restarts all nodes at every loss. "DS(FT)" drops
//! the groups that lost a node and continues with the others, as long as one is complete.

use super::account::{Cause, nanoseconds, seconds};
use super::failures::{Change, step_losses};
use super::load::Loads;
use super::outcome::{Happened, MAX_HAPPENED, Outcome, OutcomeInputs, Tally};
use super::scenario::{RestartChoices, Scenario};
use super::units::units_of;
use super::world::{Flow, Progress, World};
use crate::engine::Units;
use crate::error::Result;
use std::collections::{BTreeSet, VecDeque};

/// A job that restarts from checkpoints.
pub(super) struct Restarts<'a> {
    scenario: &'a Scenario,
    choices: &'a RestartChoices,
    units: Units,
    world: World<'a>,
    loads: Loads<'a>,
    /// Nodes that train, group by group.
    used: Vec<usize>,
    /// Steps of the state, of the newest checkpoint, and of the checkpoint in progress with the time at which it is
    /// complete.
    step: u64,
    stored: u64,
    writing: Option<(u64, u64)>,
    /// Steps since the newest checkpoint, and their nanoseconds.
    since: VecDeque<(u64, u64)>,
    /// Time since which nodes wait that could train.
    waiting_since: Option<u64>,
    tally: Tally,
}

/// The end of a run of steps.
enum End {
    Lost,
    /// Nodes that had notice have left.
    Left,
    Joins,
    Over,
}

impl<'a> Restarts<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        choices: &'a RestartChoices,
        (present, changes): (BTreeSet<usize>, &'a [Change]),
        seed: u64,
        progress: &'a mut Progress<'a>,
    ) -> Self {
        let nodes = scenario.cluster.nodes + scenario.cluster.spares;
        let mut world = World::new(changes, present, nodes, scenario.seconds, progress);
        world.step_losses = step_losses(&scenario.failures);
        Self {
            scenario,
            choices,
            units: units_of(scenario),
            world,
            loads: Loads::new(&scenario.load, &scenario.model, seed),
            used: Vec::new(),
            step: 0,
            stored: 0,
            writing: None,
            since: VecDeque::new(),
            waiting_since: None,
            tally: Tally::default(),
        }
    }

    pub(super) fn run(mut self) -> Result<Outcome> {
        let mut is_restart = true;
        while !self.world.is_over() {
            if is_restart && !self.start()? {
                continue; // a node was lost during the start
            }
            is_restart = match self.train()? {
                End::Over => break,
                End::Joins => !self.choices.drops_groups || !self.grow()?,
                End::Lost => {
                    self.detect()?;
                    !self.choices.drops_groups || !self.drop_groups()?
                }
                End::Left => !self.choices.drops_groups || !self.drop_groups()?,
            };
        }
        Ok(Outcome::new(OutcomeInputs {
            scheme: &self.choices.name,
            tokens_per_step: self.scenario.model.tokens_per_step,
            ideal_step_seconds: self.scenario.model.step_seconds,
            tally: self.tally,
            spent: &self.world.spent,
            now: self.world.now,
            member_time: self.world.member_time,
            losses: self.world.losses,
            plt: None,
        }))
    }

    /// Starts all processes and loads the newest checkpoint; false if a node is lost meanwhile.
    fn start(&mut self) -> Result<bool> {
        let group = self.choices.expert_parallel;
        self.used.clear();
        self.world.set_members(&[]);
        while self.world.up.len() < group {
            if self.world.await_change(Cause::Wait)? == Flow::Over {
                return Ok(false);
            }
        }
        self.finish_writing();
        self.writing = None; // a restart ends the processes that write it
        let groups = self.world.up.len().min(self.scenario.cluster.nodes) / group;
        self.used = self.world.up.iter().copied().take(groups * group).collect();
        self.set_members();
        self.undo();
        self.tally.restarts += 1;
        self.waiting_since = None;
        let (costs, bytes) = (&self.scenario.costs, self.bytes_per_node());
        let rebuild = costs.rebuild(self.used.len());
        let load = if self.stored > 0 { costs.read(bytes, self.used.len()) } else { 0.0 };
        for (cause, time) in
            [(Cause::Start, costs.start_seconds), (Cause::Rebuild, rebuild), (Cause::Fetch, load)]
        {
            match self.world.spend(cause, nanoseconds(time))? {
                Flow::Done => {}
                Flow::Lost => {
                    self.detect()?;
                    return Ok(false);
                }
                Flow::Over => return Ok(false),
            }
        }
        self.tally.checkpoint_loads += u64::from(self.stored > 0);
        if self.stored > 0 {
            self.tally.read_bytes += (bytes * self.used.len() as f64) as u128;
        }
        self.log("restarted");
        Ok(true)
    }

    /// Takes steps until something changes.
    fn train(&mut self) -> Result<End> {
        while !self.world.is_over() {
            self.loads.advance(self.step);
            let (compute, slower) = (nanoseconds(self.step_seconds()), self.world.slowness() - 1.0);
            let checkpoint = self.checkpoint();
            match self.world.spend(Cause::Checkpoint, checkpoint)? {
                Flow::Done => {}
                Flow::Lost => return Ok(End::Lost),
                Flow::Over => return Ok(End::Over),
            }
            let delays = [(Cause::Train, compute), (Cause::Straggle, nanoseconds(seconds(compute) * slower))];
            for (cause, time) in delays {
                let began = self.world.now;
                let flow = self.world.spend_step(cause, time, self.step)?;
                if flow == Flow::Done {
                    continue;
                }
                let computed = if cause == Cause::Train { self.world.now - began } else { compute };
                self.world.spent.move_to_repeat(computed);
                self.tally.interrupted_steps += u64::from(flow == Flow::Lost);
                return Ok(if flow == Flow::Lost { End::Lost } else { End::Over });
            }
            self.since.push_back((self.step, compute));
            self.step += 1;
            self.tally.steps += 1;
            if self.step == self.scenario.until() {
                self.world.finish();
                return Ok(End::Over);
            }
            if !self.world.leaving.is_empty() {
                self.world.let_go();
                return Ok(End::Left);
            }
            if self.should_grow() {
                return Ok(End::Joins);
            }
        }
        Ok(End::Over)
    }

    /// Begins a checkpoint if scheduled; returns the nanoseconds for which training waits until it is in host memory.
    /// Only then is it written, in the background.
    fn checkpoint(&mut self) -> u64 {
        self.finish_writing();
        let every = self.choices.checkpoint_interval;
        if self.step == 0
            || !self.step.is_multiple_of(every)
            || self.step == self.stored
            || self.writing.is_some()
        {
            return 0;
        }
        let (costs, bytes) = (&self.scenario.costs, self.bytes_per_node());
        let write = nanoseconds(costs.write(bytes, self.used.len()));
        self.tally.store_bytes += self.units.bytes.iter().map(|&bytes| u128::from(bytes)).sum::<u128>();
        let stall = nanoseconds(bytes / costs.capture_bytes_per_second + costs.persist_seconds);
        self.writing = Some((self.step, self.world.now + stall + write));
        stall
    }

    fn finish_writing(&mut self) {
        if let Some((step, _)) = self.writing.take_if(|(_, complete)| *complete <= self.world.now) {
            self.stored = step;
            while self.since.front().is_some_and(|(number, _)| *number < step) {
                self.since.pop_front();
            }
        }
    }

    /// Returns all to the newest checkpoint.
    fn undo(&mut self) {
        let lost: u64 = self.since.drain(..).map(|(_, time)| time).sum();
        self.world.spent.move_to_repeat(lost);
        let undone = self.step - self.stored;
        self.tally.steps -= undone;
        self.tally.undone_steps += undone;
        self.step = self.stored;
    }

    /// Spends the time until a loss is known. The lost node's part of a checkpoint in progress is lost with it.
    fn detect(&mut self) -> Result<()> {
        self.finish_writing();
        self.writing = None;
        self.log("lost");
        let detect = nanoseconds(self.scenario.costs.detect_seconds);
        while self.world.spend(Cause::Detect, detect)? == Flow::Lost {}
        Ok(())
    }

    /// Continues with the complete groups; false if there is none.
    fn drop_groups(&mut self) -> Result<bool> {
        let group = self.choices.expert_parallel;
        let is_complete = |nodes: &&[usize]| nodes.iter().all(|node| self.world.up.contains(node));
        let complete: Vec<usize> = self.used.chunks(group).filter(is_complete).flatten().copied().collect();
        if complete.is_empty() {
            return Ok(false);
        }
        self.used = complete;
        self.set_members();
        self.reconnect(0)
    }

    /// Forms new groups of idle nodes with the state of the others; false if a node is lost meanwhile.
    fn grow(&mut self) -> Result<bool> {
        let free = self.free();
        self.used.extend(&free);
        self.set_members();
        self.waiting_since = None;
        self.reconnect(free.len())
    }

    /// Agrees, connects, and sends the state to newcomers; false if no complete group is left.
    fn reconnect(&mut self, newcomers: usize) -> Result<bool> {
        let costs = &self.scenario.costs;
        let rebuild = costs.rebuild(self.used.len());
        let group = self.choices.expert_parallel;
        let per_node = self.units.bytes.iter().sum::<u64>() as f64 / group as f64;
        let fetch =
            if newcomers > 0 { per_node / self.scenario.cluster.network_bytes_per_second } else { 0.0 };
        self.tally.recovery_bytes += (per_node * newcomers as f64) as u128;
        let times = [(Cause::Agree, costs.agree_seconds), (Cause::Rebuild, rebuild), (Cause::Fetch, fetch)];
        for (cause, time) in times {
            match self.world.spend(cause, nanoseconds(time))? {
                Flow::Done => {}
                Flow::Lost => {
                    self.detect()?;
                    return self.drop_groups();
                }
                Flow::Over => return Ok(true),
            }
        }
        self.tally.recoveries += 1;
        self.log("resumed");
        Ok(true)
    }

    /// Nodes of as many complete groups as there is room for.
    fn free(&self) -> Vec<usize> {
        let group = self.choices.expert_parallel;
        let used: BTreeSet<usize> = self.used.iter().copied().collect();
        let room = self.scenario.cluster.nodes.saturating_sub(used.len());
        let ready: Vec<usize> = self.world.up.iter().copied().filter(|node| !used.contains(node)).collect();
        let count = ready.len().min(room) / group * group;
        ready[..count].to_vec()
    }

    /// Whether nodes that form a group have waited long enough.
    fn should_grow(&mut self) -> bool {
        if self.world.up.len() < self.used.len() + self.choices.expert_parallel || self.free().is_empty() {
            self.waiting_since = None;
            return false;
        }
        let since = *self.waiting_since.get_or_insert(self.world.now);
        self.world.now >= since + nanoseconds(self.choices.join_seconds)
    }

    fn set_members(&mut self) {
        self.used.truncate(self.used.len() / self.choices.expert_parallel * self.choices.expert_parallel);
        self.world.set_members(&self.used);
        self.tally.note_members(self.used.len());
    }

    /// Each group has all experts and each of its nodes the same number; the busiest node of a group decides.
    fn step_seconds(&self) -> f64 {
        let (model, group) = (&self.scenario.model, self.choices.expert_parallel);
        let share = (self.scenario.cluster.nodes as f64 / self.used.len().max(1) as f64).powf(model.scaling);
        let each = model.experts.div_ceil(group).max(1);
        let busiest = |class: usize| {
            let loads = self.loads.of_class(class).chunks(each).map(|chunk| chunk.iter().sum::<f64>());
            loads.fold(0.0, f64::max) * group as f64
        };
        let imbalance = (0..model.classes).map(busiest).fold(1.0, f64::max);
        model.step_seconds * share * (1.0 - model.expert_share + model.expert_share * imbalance)
    }

    fn bytes_per_node(&self) -> f64 {
        self.units.bytes.iter().sum::<u64>() as f64 / self.used.len().max(1) as f64
    }

    fn log(&mut self, what: &'static str) {
        if self.tally.happened.len() < MAX_HAPPENED {
            let happened = Happened { at: self.world.now, what, step: self.step, members: self.used.len() };
            self.tally.happened.push(happened);
        }
    }
}
