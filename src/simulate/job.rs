//! A job of one of the product's presets: executes the protocol's commands in simulated time.

use super::account::{Cause, nanoseconds};
use super::failures::{Change, step_losses};
use super::load::Loads;
use super::member::Members;
use super::outcome::{Happened, MAX_HAPPENED, Outcome, OutcomeInputs, Tally};
use super::pace::Pace;
use super::planners::Planners;
use super::scenario::Scenario;
use super::units::{RankUnits, units_of};
use super::world::{Flow, Progress, World};
use crate::engine::{Engine, Options};
use crate::error::Result;
use crate::protection::Preset;
use crate::protocol::{Command, Event, Passed, step_of};
use crate::selection::TokenLedger;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Maximum number of steps that are remembered in order to be undone.
const MAX_STEPS: usize = 1 << 20;

/// A job.
pub(super) struct Job<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) preset: &'static Preset,
    pub(super) planners: &'a dyn Planners,
    pub(super) engine: Engine,
    pub(super) world: World<'a>,
    pub(super) loads: Loads<'a>,
    pub(super) members: Members,
    /// Units of the training members, by rank.
    pub(super) rank_units: Vec<RankUnits>,
    /// Units of members that were lost since the last recovery.
    pub(super) vacated: Vec<RankUnits>,
    /// Nodes of the next group, by rank.
    pub(super) agreed: Vec<usize>,
    pub(super) pace: Pace,
    /// The time at which the save of a few experts that is in progress is complete.
    pub(super) saving_until: Option<u64>,
    /// The newest checkpoint in the store.
    pub(super) stored: Option<u64>,
    /// The checkpoint in progress, and the time at which it is complete.
    pub(super) writing: Option<(u64, u64)>,
    /// Units that the last recovery restored from older versions.
    pub(super) stale: Vec<(usize, u64)>,
    /// Bytes per second from the state to host memory, if members have measured it.
    pub(super) host_speed: Option<f64>,
    /// Steps that were taken, and their nanoseconds.
    taken: VecDeque<(u64, u64)>,
    /// Time since which units are missing.
    pub(super) missing_since: Option<u64>,
    /// Time at which members began to compute digests of their units, if nothing was written since.
    pub(super) surveying_since: Option<u64>,
    /// Newcomers that replace lost nodes, by the lost node.
    pub(super) substitutes: BTreeMap<usize, usize>,
    lost_at: Option<u64>,
    pub(super) tally: Tally,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        preset: &'static Preset,
        planners: &'a dyn Planners,
        (present, changes): (BTreeSet<usize>, &'a [Change]),
        seed: u64,
        progress: &'a mut Progress<'a>,
    ) -> Result<Self> {
        let nodes = scenario.cluster.nodes + scenario.cluster.spares;
        let session = &scenario.session;
        let options = Options {
            preset,
            replication: session.copies,
            copy_budget: session.copy_budget,
            snapshot_interval: session.snapshot_interval,
            experts_per_save: session.experts_per_save,
            save_interval: session.save_interval,
            max_lost_token_fraction: session.max_lost_token_fraction,
            remote_bytes_per_step: session.remote_bytes_per_step,
        };
        let mut world = World::new(changes, present, nodes, scenario.seconds, progress);
        world.step_losses = step_losses(&scenario.failures);
        Ok(Self {
            scenario,
            preset,
            planners,
            world,
            loads: Loads::new(&scenario.load, &scenario.model, seed),
            members: Members::new(&scenario.session, 0),
            rank_units: Vec::new(),
            vacated: Vec::new(),
            agreed: Vec::new(),
            pace: Pace::default(),
            saving_until: None,
            stored: None,
            writing: None,
            stale: Vec::new(),
            host_speed: None,
            taken: VecDeque::new(),
            missing_since: None,
            surveying_since: None,
            substitutes: BTreeMap::new(),
            lost_at: None,
            tally: Tally::default(),
            engine: Engine::new(options, units_of(scenario))?,
        })
    }

    /// Runs until the simulated time is over.
    pub(super) fn run(mut self) -> Result<Outcome> {
        let (start, until) = (nanoseconds(self.scenario.costs.start_seconds), self.scenario.until());
        let mut event = match self.world.spend(Cause::Start, start)? {
            Flow::Over => None,
            _ => Some(Event::Look { until }),
        };
        while let Some(happened) = event {
            let commands = self.members.handle(happened)?;
            event = Some(Event::Look { until });
            for command in commands {
                if let Some(answer) = self.carry_out(command)? {
                    event = Some(answer);
                }
            }
            if self.world.is_over() {
                break;
            }
        }
        Ok(self.outcome())
    }

    /// Executes a command of the protocol; returns the event that answers it.
    fn carry_out(&mut self, command: Command) -> Result<Option<Event>> {
        if self.world.is_over() {
            return Ok(None);
        }
        match command {
            Command::Ask { standing, is_intact } => self.ask(standing, is_intact),
            Command::Inquire { standing } => {
                self.members.standing = Some(standing);
                Ok(None)
            }
            Command::Compare { set } => Ok(Some(Event::Compared { sets: vec![set; self.members.size] })),
            Command::Wait(_) | Command::Withdraw => {
                self.world.await_change(Cause::Wait)?;
                Ok(Some(Event::Waited))
            }
            Command::Connect { members, .. } => self.connect(members.len()),
            Command::Weigh => Ok(Some(Event::Weighed { should_move: self.should_move()? })),
            Command::Recall { vote } => Ok(Some(Event::Recalled { votes: vec![vote] })),
            Command::Take { vote, .. } => self.take(&vote).map(|()| None),
            Command::Restore { version, .. } => self.restore(version).map(Some),
            Command::CountLosses { .. } => self.count_losses().map(|()| Some(Event::Counted)),
            Command::Protect { version, waits, .. } => self.protect(version, waits).map(Some),
            Command::Resume { version } => self.resume(version).map(|()| None),
            Command::Step { number } | Command::Follow { number } => self.step(number).map(Some),
            Command::Vote { calls, .. } => Ok(Some(self.vote(calls))),
            Command::Settle => {
                self.world.let_go();
                Ok(Some(Event::Settled { is_whole: true }))
            }
            Command::Pause => {
                let patience = nanoseconds(self.scenario.session.rejoin_timeout);
                let since = self.missing_since.unwrap_or(self.world.now);
                self.world.spend(Cause::Wait, (since + patience).saturating_sub(self.world.now))?;
                Ok(None)
            }
            Command::Stop(_) => self.start_again().map(|()| None),
            Command::Farewell { .. } => Ok(Some(Event::Parted)),
            Command::Close { .. } => {
                self.world.finish();
                Ok(None)
            }
            Command::Commit { .. } | Command::Drop { .. } | Command::Leave => Ok(None),
        }
    }

    /// Reports the loss of a member to the others.
    pub(super) fn lost(&mut self) -> Result<Event> {
        self.lost_at.get_or_insert(self.world.now);
        self.abandon_writing();
        let detect = nanoseconds(self.scenario.costs.detect_seconds);
        while self.world.spend(Cause::Detect, detect)? == Flow::Lost {}
        if self.pace.late_state == 0.0 {
            self.surveying_since.get_or_insert(self.world.now);
        }
        self.log("lost");
        Ok(Event::Lost { reason: String::new() })
    }

    /// Returns the answer to a command that takes time, or a loss if a member is lost meanwhile.
    pub(super) fn unless_lost(&mut self, flow: Flow, answer: Event) -> Result<Event> {
        if flow == Flow::Lost { self.lost() } else { Ok(answer) }
    }

    fn connect(&mut self, size: usize) -> Result<Option<Event>> {
        self.members.size = size;
        self.surveying_since.get_or_insert(self.world.now);
        let seconds = self.scenario.costs.rebuild(self.agreed.len());
        let flow = self.world.spend(Cause::Rebuild, nanoseconds(seconds))?;
        self.unless_lost(flow, Event::Connected).map(Some)
    }

    fn resume(&mut self, version: u64) -> Result<()> {
        self.members.settle()?;
        self.engine.resume(version)?;
        if let Some(lost) = self.lost_at.take() {
            self.tally.recovery_nanoseconds.push(self.world.now - lost);
        }
        self.log("resumed");
        Ok(())
    }

    fn vote(&mut self, calls: bool) -> Event {
        let leaving = self.world.leaving.len();
        Event::Tally {
            votes: self.members.size,
            leaving,
            newcomer_seen: usize::from(calls),
            sums: Vec::new(),
        }
    }

    /// Takes a step.
    fn take(&mut self, vote: &Passed) -> Result<()> {
        self.surveying_since = None;
        self.taken.push_back((step_of(vote.before), std::mem::take(&mut self.pace.computing)));
        if self.taken.len() > MAX_STEPS {
            self.taken.pop_front();
        }
        self.tally.steps += 1;
        self.taken_step(vote.after)
    }

    /// Returns all members to the state after this number of steps.
    pub(super) fn undo(&mut self, step: u64) {
        let mut nanoseconds = 0;
        let done = self.tally.steps;
        while let Some(&(_, spent)) = self.taken.back().filter(|(number, _)| *number >= step) {
            nanoseconds += spent;
            self.taken.pop_back();
        }
        let undone = done.saturating_sub(step);
        if step == 0 && undone > 0 {
            nanoseconds = u64::MAX; // applies to steps that are not remembered, too
        }
        self.world.spent.move_to_repeat(nanoseconds);
        self.tally.steps -= undone;
        self.tally.undone_steps += undone;
    }

    /// Restarts the job from the store after it is over for its members.
    fn start_again(&mut self) -> Result<()> {
        self.tally.restarts += 1;
        self.log("restarted");
        self.forget_members();
        self.world.set_members(&[]);
        let start = nanoseconds(self.scenario.costs.start_seconds);
        self.world.spend(Cause::Start, start)?;
        Ok(())
    }

    /// Discards all processes with the contents of their memory.
    pub(super) fn forget_members(&mut self) {
        let generation = self.members.generation();
        self.members = Members::new(&self.scenario.session, generation);
        self.rank_units.clear();
        self.vacated.clear();
        self.engine.forget();
        self.writing = None;
    }

    fn outcome(self) -> Outcome {
        let world = &self.world;
        Outcome::new(OutcomeInputs {
            scheme: self.preset.name.name(),
            tokens_per_step: self.scenario.model.tokens_per_step,
            ideal_step_seconds: self.scenario.model.step_seconds,
            tally: self.tally,
            spent: &world.spent,
            now: world.now,
            member_time: world.member_time,
            losses: world.losses,
            plt: self.engine.ledger().map(TokenLedger::plt),
        })
    }

    pub(super) fn log(&mut self, what: &'static str) {
        if self.tally.happened.len() < MAX_HAPPENED {
            let step = step_of(self.engine.history().newest);
            let (members, at) = (self.rank_units.len(), self.world.now);
            self.tally.happened.push(Happened { at, what, step, members });
        }
    }
}
