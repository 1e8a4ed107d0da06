//! The engine: a plan's copies, as steps are taken and nodes are lost.

use super::copies::{Copies, History, UnitCopies};
use super::in_turn::{StepCopies, Turns};
use super::options::Options;
use super::traffic::{Network, Pace, Sends, chunk_schedule};
use super::units::Units;
use crate::error::Result;
use crate::protection::{Copying, ProtectionRequest, RankInfo, Selecting, UnitInfo, plan_protection};
use crate::protocol::step_of;
use crate::selection::{Selection, TokenLedger};
use std::collections::BTreeMap;

/// Members for which copies are planned, by rank.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a> {
    /// Number of each rank's node.
    pub nodes: &'a [usize],
    /// Capacities and measurements.
    pub ranks: &'a [RankInfo],
    /// Sizes, and the ranks that train each unit.
    pub units: &'a [UnitInfo],
}

impl Members<'_> {
    fn step_seconds(&self) -> f64 {
        self.ranks.iter().filter_map(|rank| rank.step_seconds).fold(0.0, f64::max)
    }

    fn speeds(&self) -> Vec<Option<f64>> {
        self.ranks.iter().map(|rank| rank.link.map(|link| link.beta)).collect()
    }

    fn active(&self) -> Vec<Vec<usize>> {
        self.units.iter().map(|unit| unit.active.clone()).collect()
    }
}

/// A plan's first copies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Planned {
    /// Bytes that nodes lack of the copies of the current state.
    pub first: Sends,
    /// Bytes of planned copies that have no room.
    pub missing_bytes: u64,
    /// Whether all nodes have room for new copies next to the former ones, so that training continues meanwhile.
    pub has_room: bool,
}

/// What a preset does to the steps of a job.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) options: Options,
    pub(super) units: Units,
    copies: Option<Copies>,
    /// The copies of the previous plan, until the first of the new one are complete.
    former: Option<Copies>,
    /// Nodes that train each unit.
    pub(super) active: Vec<Vec<usize>>,
    pub(super) history: History,
    pub(super) turns: Option<Turns>,
    /// Seconds by which the latest plan of `auto` expects copies to delay a step.
    chosen_delay: f64,
}

impl Engine {
    /// An engine without a plan.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for options that no ledger accepts.
    pub fn new(options: Options, units: Units) -> Result<Self> {
        let turns = match options.preset.selection {
            Selecting::All => None,
            _ => Some(Turns::new(&options, &units)?),
        };
        let active = vec![Vec::new(); units.bytes.len()];
        Ok(Self {
            options,
            units,
            copies: None,
            former: None,
            active,
            history: History::default(),
            turns,
            chosen_delay: 0.0,
        })
    }

    /// Sizes of the units.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Versions of the steps that were taken.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Tokens since the latest copies, where experts take turns.
    pub fn ledger(&self) -> Option<&TokenLedger> {
        self.turns.as_ref().map(Turns::ledger)
    }

    /// Nodes that train each unit under the latest plan.
    pub fn active(&self) -> &[Vec<usize>] {
        &self.active
    }

    /// Bytes that all members together may send to peers in a step for experts that take turns; none if none do.
    pub fn remote_budget(&self) -> Option<u64> {
        self.turns.as_ref().and_then(Turns::remote_budget)
    }

    /// Lets each of the next steps stand for this number of steps of the job, whose tokens it gets.
    ///
    /// A budget counts for all of them, and the steps between two saves count in strides.
    pub fn set_stride(&mut self, steps: u64) {
        if let Some(turns) = &mut self.turns {
            turns.set_stride(steps);
        }
    }

    /// The copies that a recovery can rely on now: those of the former plan until the first of the new one are complete.
    pub fn copies(&self) -> Option<&Copies> {
        self.former.as_ref().or(self.copies.as_ref())
    }

    /// Versions in the store of units that are saved one by one.
    pub fn saved(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.turns.iter().flat_map(Turns::saved)
    }

    // ---- plans

    /// Plans the copies of these members, whose state is `version`.
    ///
    /// Copies that do not fit into host memory are missing. If there is no room for new copies next to the former ones, these
    /// are removed first.
    ///
    /// # Errors
    /// Those of [`plan_protection`].
    pub fn plan(&mut self, members: &Members<'_>, version: u64) -> Result<Planned> {
        let plan = plan_protection(&ProtectionRequest {
            preset: self.options.preset,
            units: members.units,
            ranks: members.ranks,
            copies: self.options.replication,
            budget: self.options.copy_budget,
        })?;
        let takes_turns = self.turns.is_some();
        let mut copies = Copies::new(&plan, members.nodes, version, takes_turns, &self.units);
        let mut room: BTreeMap<usize, u64> = BTreeMap::new();
        for (&node, rank) in members.nodes.iter().zip(members.ranks) {
            let free = room.entry(node).or_default();
            *free = free.saturating_add(rank.free_bytes);
        }
        let has_room = self.make_room(&copies, &room);
        let missing_bytes = copies.fit(&room, &self.units, self.options.preset.per_expert_versions);
        let first = self.follow_plan(copies, members)?;
        self.chosen_delay = plan.delay_seconds;
        Ok(Planned { first, missing_bytes, has_room })
    }

    /// Keeps the copies of the former plan with other nodes in place of lost ones, whose state is `version`.
    ///
    /// `now` returns the node in place of one, itself if it is left. Returns the missing copies; none if the former plan
    /// cannot be kept, so that all copies must be planned again.
    ///
    /// # Errors
    /// Those of the planners.
    pub fn keep_plan(
        &mut self,
        members: &Members<'_>,
        now: impl Fn(usize) -> Option<usize>,
        version: u64,
    ) -> Result<Option<Sends>> {
        let Some(former) = &self.former else { return Ok(None) };
        let wanted = self.options.replication.min(members.nodes.len());
        let mut units = Vec::with_capacity(former.units.len());
        for (each, info) in former.units.iter().zip(members.units) {
            let holders: Vec<usize> = each.holders.iter().copied().filter_map(&now).collect();
            let is_covered = holders.len() == each.holders.len();
            if !is_covered || (holders.is_empty() && info.active.len() < wanted) {
                return Ok(None);
            }
            let active = || info.active.first().map(|&rank| members.nodes[rank]);
            let Some(primary) = now(each.primary).or_else(active) else { return Ok(None) };
            let takes_turns = self.turns.is_some() && units.len() < self.units.num_experts();
            let version = takes_turns.then_some(version);
            let own = each.own.iter().copied().filter_map(&now).collect();
            units.push(UnitCopies { primary, holders, own, version, ..each.clone() });
        }
        self.follow_plan(Copies::of(units, version), members).map(Some)
    }

    fn follow_plan(&mut self, copies: Copies, members: &Members<'_>) -> Result<Sends> {
        let nodes = |ranks: &Vec<usize>| ranks.iter().map(|&rank| members.nodes[rank]).collect();
        self.active = members.units.iter().map(|unit| nodes(&unit.active)).collect();
        if let Some(turns) = &mut self.turns {
            let (active, speeds) = (members.active(), members.speeds());
            turns.replan(&active, &copies, members.step_seconds(), &speeds, &self.units)?;
        }
        let first = copies.first_sends(self.former.as_ref(), &self.history, &self.units);
        self.copies = Some(copies);
        Ok(first)
    }

    fn make_room(&mut self, copies: &Copies, room: &BTreeMap<usize, u64>) -> bool {
        let mut wanted = copies.host_bytes(&self.units);
        if let Some(former) = &self.former {
            for (node, bytes) in former.host_bytes(&self.units) {
                *wanted.entry(node).or_default() += bytes;
            }
        }
        let is_roomy = wanted.iter().all(|(node, bytes)| room.get(node).is_none_or(|room| bytes <= room));
        if !is_roomy {
            self.former = self.former.take().map(Copies::removed);
        }
        is_roomy
    }

    /// Plans when the copies of the latest plan are sent.
    ///
    /// # Errors
    /// Those of [`plan_chunks`](crate::schedule::plan_chunks).
    pub fn pace(&mut self, network: &Network) -> Result<Pace> {
        let Some(copies) = &mut self.copies else { return Ok(Pace::default()) };
        let part = self.turns.as_ref().map_or(1.0, |turns| turns.followed_part(copies, &self.units));
        let sends = copies.version_sends(part, &self.units);
        let preset = self.options.preset;
        let is_scheduled = preset.copying != Copying::Chosen || copies.is_late();
        let wanted = if self.turns.is_some() { Some(1) } else { self.options.snapshot_interval };
        let schedule = match preset.schedule.filter(|_| is_scheduled) {
            Some(policy) => chunk_schedule(&sends, policy, wanted, network)?,
            None => None,
        };
        let (delay_seconds, window_steps, version_steps) = match schedule {
            Some((found, steps)) => (found.delay_seconds, found.steps_in_windows, steps),
            None => (self.chosen_delay, (self.chosen_delay == 0.0).then_some(1), 1),
        };
        copies.steps = version_steps;
        let in_turns = self.turns.as_ref().map_or(0, |_| self.units.num_experts()); // counted when they are selected
        let bytes =
            |unit: usize| copies.version_bytes(unit, &self.units) * copies.units[unit].holders.len() as u64;
        let bytes = (in_turns..copies.units.len()).map(bytes).sum::<u64>() / version_steps;
        Ok(Pace { delay_seconds, version_steps, window_steps, bytes })
    }

    /// Records that the first copies of the latest plan are complete: the former ones are removed.
    pub fn release(&mut self) {
        self.former = None;
    }

    /// Bytes of the latest plan's copies in the host memory of each node.
    pub fn host_bytes(&self) -> BTreeMap<usize, u64> {
        self.copies.as_ref().map(|copies| copies.host_bytes(&self.units)).unwrap_or_default()
    }

    // ---- steps

    /// Selects the experts whose copies follow the step that begins, by layer; none if all copies follow it.
    ///
    /// # Errors
    /// Those of the selection.
    pub fn begin_step(&mut self) -> Result<Option<&Selection>> {
        match &mut self.turns {
            Some(turns) if self.copies.is_some() => turns.begin_step().map(Some),
            _ => Ok(None),
        }
    }

    /// Records a step in which each expert received `counts` tokens; `version` is the new state.
    ///
    /// # Errors
    /// Those of the selection and of the ledger.
    pub fn take_step(&mut self, version: u64, counts: impl FnOnce() -> Vec<i64>) -> Result<StepCopies> {
        self.history.record(version);
        self.former = None;
        if let Some(copies) = &mut self.copies {
            copies.advance(step_of(version));
        }
        match &mut self.turns {
            Some(turns) => turns.take_step(&counts(), version, self.copies.as_mut(), &self.units),
            None => Ok(StepCopies::default()),
        }
    }

    /// Ends the save in progress: all members have written their parts, or one of them is lost with its part.
    pub fn end_save(&mut self, is_complete: bool) {
        if let Some(turns) = &mut self.turns {
            turns.end_save(is_complete);
        }
    }

    /// Records that all members continue from `version`, of which all copies are current.
    ///
    /// # Errors
    /// Those of the ledger.
    pub fn resume(&mut self, version: u64) -> Result<()> {
        self.history.record(version);
        if let (Some(turns), Some(copies)) = (&mut self.turns, &self.copies) {
            turns.mark_copied(copies, version, &self.units)?;
        }
        Ok(())
    }

    // ---- recoveries

    /// Records that members restored `version`; the copies stay as they are until those of a new plan are complete.
    pub fn restore(&mut self, version: u64) {
        if let Some(copies) = self.former.take().or(self.copies.take()) {
            self.former = Some(copies.frozen(&self.history));
        }
        self.history.record(version);
    }

    /// Returns these experts to copies of these versions. Returns the tokens that they lost; none if no ledger counts them.
    ///
    /// # Errors
    /// Those of the ledger.
    pub fn lose(&mut self, stale: &[(usize, u64)]) -> Result<Option<f64>> {
        self.turns.as_mut().map(|turns| turns.lose(stale, &self.units)).transpose()
    }

    /// Discards all copies in memory: all nodes were lost.
    pub fn forget(&mut self) {
        (self.copies, self.former) = (None, None);
        self.active.iter_mut().for_each(Vec::clear);
        self.history = History::default();
    }
}
