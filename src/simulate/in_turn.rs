//! Experts that are copied a few at a time: by `pec` into the store, by `moetion` to peers.

use super::copies::Copies;
use super::load::Loads;
use super::planners::Planners;
use super::scenario::Scenario;
use super::units::Units;
use crate::dispatch::LoadAverage;
use crate::error::Result;
use crate::placement::primaries;
use crate::protection::{CopyKind, Selecting, copy_budget, levels, unmeasured_budget};
use crate::protocol::step_of;
use crate::selection::{Selection, TokenLedger};

/// Steps after which a step counts half in the average load of the experts, as in a session.
const LOAD_HALF_LIFE: f64 = 7.0;

/// Result of the copies after a step.
pub(super) struct Saved {
    pub(super) store_bytes: u64,
    pub(super) peer_bytes: u64,
}

/// A copy of an expert in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stored {
    version: u64,
    /// Tokens that the expert had processed.
    processed: i64,
}

/// The token ledger and the state of the copies that it selects.
pub(super) struct Turns {
    selecting: Selecting,
    ledger: TokenLedger,
    /// For each expert, the node that saves it if it is selected.
    ranks: Vec<i64>,
    tokens_per_step: f64,
    /// Average tokens of each expert in a step.
    average: LoadAverage,
    /// Experts to copy after the step in progress.
    following: Selection,
    save_interval: u64,
    /// Bytes that the session asks to send to peers in a step.
    requested: Option<u64>,
    /// Bytes that may be sent to peers in a step.
    budget: u64,
    expert_bytes: u64,
    /// Newest complete copy of each unit. For `moetion`, the versions are those of its copies.
    stored: Vec<Option<Stored>>,
    /// Copies in progress, and the time at which they are complete.
    writing: Option<(u64, Vec<(usize, Stored)>)>,
    /// Experts that were copied after the previous step: only their gradients are sent.
    followed: Vec<bool>,
}

impl Turns {
    pub(super) fn new(scenario: &Scenario, selecting: Selecting, units: &Units) -> Result<Self> {
        let (session, experts) = (&scenario.session, units.experts);
        let each = levels(experts, None, session.experts_per_save).save;
        let expert_bytes = units.bytes[..units.num_experts()].iter().copied().max().unwrap_or(1).max(1);
        let all: u64 = units.bytes[..units.num_experts()].iter().sum();
        Ok(Self {
            selecting,
            ledger: TokenLedger::new(units.classes, experts, each, session.max_lost_token_fraction)?,
            ranks: Vec::new(),
            tokens_per_step: scenario.model.tokens_per_step as f64,
            average: LoadAverage::new(units.classes, experts, LOAD_HALF_LIFE)?,
            following: vec![Vec::new(); units.classes],
            save_interval: session.save_interval,
            requested: session.remote_bytes_per_step,
            budget: session.remote_bytes_per_step.unwrap_or(unmeasured_budget(expert_bytes, all)),
            expert_bytes,
            stored: vec![None; units.bytes.len()],
            writing: None,
            followed: vec![false; units.num_experts()],
        })
    }

    /// Assigns units to new ranks: `active`, by unit. `speeds` are the bytes per second of each rank's link.
    pub(super) fn replan(
        &mut self,
        active: &[Vec<usize>],
        step_seconds: f64,
        speeds: &[Option<f64>],
        units: &Units,
    ) -> Result<()> {
        let ranks = speeds.len();
        self.budget = self.requested.or(copy_budget(step_seconds, speeds)).unwrap_or(self.budget);
        let experts = &active[..units.num_experts()];
        let savers = primaries(experts, &vec![1; experts.len()], ranks)?;
        self.ranks = savers.into_iter().map(|rank| rank as i64).collect();
        Ok(())
    }

    /// Versions in the store, by unit.
    pub(super) fn saved(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let is_stored = self.selecting == Selecting::LoadAware;
        let found = self.stored.iter().enumerate().filter(move |_| is_stored);
        found.filter_map(|(unit, stored)| stored.map(|stored| (unit, stored.version)))
    }

    /// Portion of lost tokens (PLT).
    pub(super) fn plt(&self) -> f64 {
        self.ledger.plt()
    }

    /// Share of the followed bytes that the budget allows to send in a step.
    pub(super) fn followed_part(&self, copies: &Copies, units: &Units) -> f64 {
        let experts = copies.units[..units.num_experts()].iter();
        let kept = experts.zip(&units.bytes).filter(|(each, _)| each.kind == CopyKind::Replayed);
        let all: u64 = kept.map(|(each, &bytes)| bytes * each.holders.len() as u64).sum();
        if all == 0 { 1.0 } else { (self.budget as f64 / all as f64).min(1.0) }
    }

    fn processed(&self, unit: usize) -> i64 {
        self.ledger.seen()[unit] - self.ledger.lost()[unit]
    }

    /// `moetion`: selects the experts to copy after the step that begins. Of those that peers keep, they are the ones
    /// with the most tokens at risk after the step, within the budget. The step's own tokens are not known yet, so the
    /// average counts.
    pub(super) fn begin_step(&mut self, planners: &dyn Planners, copies: Option<&Copies>) -> Result<()> {
        let Some(copies) = copies.filter(|_| self.selecting == Selecting::Budget) else { return Ok(()) };
        let is_kept = |unit: usize| copies.units[unit].kind == CopyKind::Replayed;
        let expected =
            self.average.loads().into_iter().map(|tokens| (tokens.round_ties_even() as i64).max(1));
        let at_risk = self.ledger.at_risk().iter().zip(expected).enumerate();
        let tokens: Vec<i64> = at_risk
            .map(|(unit, (&tokens, expected))| if is_kept(unit) { tokens + expected } else { 0 })
            .collect();
        self.following = planners.budget(&tokens, self.ledger.shape(), self.budget / self.expert_bytes)?;
        Ok(())
    }

    /// Copies experts after a step; `version` is the new state.
    pub(super) fn taken(
        &mut self,
        loads: &Loads<'_>,
        planners: &dyn Planners,
        version: u64,
        copies: &mut Option<Copies>,
        units: &Units,
    ) -> Result<Option<Saved>> {
        let counts: Vec<i64> = (0..units.classes)
            .flat_map(|class| {
                loads.of_class(class).iter().map(|share| (share * self.tokens_per_step).round() as i64)
            })
            .collect();
        self.ledger.add(&counts)?;
        self.average.add(&counts)?;
        match self.selecting {
            Selecting::LoadAware => self.save(planners, version, units),
            _ => self.follow(version, copies, units),
        }
    }

    /// `pec`: saves K experts of each layer and all other state, unless the previous save is still in progress.
    fn save(&mut self, planners: &dyn Planners, version: u64, units: &Units) -> Result<Option<Saved>> {
        if !step_of(version).is_multiple_of(self.save_interval) || self.writing.is_some() {
            return Ok(None);
        }
        let chosen = planners.load_aware(&self.ledger, &self.ranks)?;
        self.ledger.copied(&chosen)?;
        let copied: Vec<usize> = flat(&chosen, units.experts).chain(units.dense()).collect();
        let store_bytes = copied.iter().map(|&unit| units.bytes[unit]).sum();
        let stored = |unit: usize| {
            let processed = if unit < units.num_experts() { self.processed(unit) } else { 0 };
            (unit, Stored { version, processed })
        };
        self.writing = Some((u64::MAX, copied.into_iter().map(stored).collect()));
        Ok(Some(Saved { store_bytes, peer_bytes: 0 }))
    }

    /// Sets the time at which the save in progress is complete.
    pub(super) fn busy_until(&mut self, at: u64) {
        if let Some((complete, _)) = &mut self.writing {
            *complete = at;
        }
    }

    /// Advances to this time.
    pub(super) fn advance(&mut self, now: u64) {
        if let Some((_, copied)) = self.writing.take_if(|(complete, _)| *complete <= now) {
            for (unit, stored) in copied {
                self.stored[unit] = Some(stored);
            }
        }
    }

    /// Abandons the save in progress unless it is complete by now.
    pub(super) fn abandon(&mut self, now: u64) {
        self.advance(now);
        self.writing = None;
    }

    /// `moetion`: copies the experts that were selected as the step began.
    fn follow(&mut self, version: u64, copies: &mut Option<Copies>, units: &Units) -> Result<Option<Saved>> {
        let Some(copies) = copies else { return Ok(None) };
        let chosen = std::mem::replace(&mut self.following, vec![Vec::new(); units.classes]);
        self.ledger.copied(&chosen)?;
        let mut peer_bytes = 0;
        let mut followed = vec![false; units.num_experts()];
        for unit in flat(&chosen, units.experts) {
            followed[unit] = true;
            let each = if self.followed[unit] { units.gradients[unit] } else { units.bytes[unit] };
            let kept = &mut copies.units[unit];
            peer_bytes += each * kept.holders.len() as u64;
            kept.version = Some(version);
            self.stored[unit] = Some(Stored { version, processed: self.processed(unit) });
        }
        self.followed = followed;
        Ok(Some(Saved { store_bytes: 0, peer_bytes }))
    }

    /// Marks all copies as current.
    pub(super) fn all_copied(&mut self, copies: &Copies, version: u64, units: &Units) -> Result<()> {
        if self.selecting != Selecting::Budget {
            return Ok(());
        }
        let mut chosen: Selection = vec![Vec::new(); units.classes];
        for unit in 0..units.num_experts() {
            if copies.units[unit].kind == CopyKind::Replayed {
                chosen[unit / units.experts].push(unit % units.experts);
                self.stored[unit] = Some(Stored { version, processed: self.processed(unit) });
            }
        }
        self.ledger.copied(&chosen)
    }

    /// Returns these experts to copies of these versions; returns the tokens that they lost.
    pub(super) fn lose(&mut self, stale: &[(usize, u64)], units: &Units) -> Result<f64> {
        let mut lost = vec![0; units.num_experts()];
        let mut experts: Selection = vec![Vec::new(); units.classes];
        for &(unit, version) in stale {
            let stored = self.stored[unit].filter(|stored| stored.version == version);
            let processed = stored.map_or(0, |stored| stored.processed);
            lost[unit] = (self.processed(unit) - processed).max(0);
            experts[unit / units.experts].push(unit % units.experts);
        }
        if stale.is_empty() {
            return Ok(0.0);
        }
        self.ledger.lose(&experts, Some(&lost))?;
        Ok(lost.iter().sum::<i64>() as f64)
    }
}

fn flat(chosen: &Selection, experts: usize) -> impl Iterator<Item = usize> + '_ {
    let units = move |(class, row): (usize, &'_ Vec<usize>)| {
        row.iter().map(|expert| class * experts + expert).collect::<Vec<_>>()
    };
    chosen.iter().enumerate().flat_map(units)
}
