//! Experts that are copied a few at a time: by `pec` into the store, by `moetion` to peers.

use super::copies::Copies;
use super::options::Options;
use super::selector::{Budgets, Selector};
use super::units::Units;
use crate::dispatch::LoadAverage;
use crate::error::Result;
use crate::protection::{CopyKind, Selecting, copy_budget, levels};
use crate::protocol::step_of;
use crate::selection::{Selection, TokenLedger};

/// Steps after which a step counts half in the average load of the experts.
pub const LOAD_HALF_LIFE: f64 = 7.0;

/// Copies that are made after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCopies {
    /// Bytes that are sent to peers for experts that take turns.
    pub peer_bytes: u64,
    /// Bytes that are written to the store; [`Engine::end_save`](super::Engine::end_save) must follow if there are any.
    pub store_bytes: u64,
}

/// A copy of a unit in the store, or of an expert on a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stored {
    version: u64,
    /// Tokens that the expert had processed.
    processed: i64,
}

/// The token ledger and the state of the copies that it selects.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    selecting: Selecting,
    selector: Selector,
    ledger: TokenLedger,
    /// Average tokens of each expert in a step.
    average: LoadAverage,
    /// Experts to copy after the step in progress.
    following: Selection,
    save_interval: u64,
    /// Steps of the job for which each step stands.
    stride: u64,
    /// Bytes that the links carry in a step.
    measured: Option<u64>,
    /// Newest complete copy of each unit. For `moetion`, the versions are those of its copies.
    stored: Vec<Option<Stored>>,
    /// Save in progress.
    saving: Option<Vec<(usize, Stored)>>,
    /// Whether a save was scheduled while another was in progress: it begins with the first step after that one.
    is_owed: bool,
    /// Experts whose copies are current as a step begins: only their gradients are sent.
    followed: Vec<bool>,
}

impl Turns {
    pub(super) fn new(options: &Options, units: &Units) -> Result<Self> {
        let experts = units.experts;
        let each = levels(experts, None, options.experts_per_save).save;
        let budgets = Budgets { remote: options.remote_bytes_per_step, local: None };
        let bytes = &units.bytes[..units.num_experts()];
        Ok(Self {
            selecting: options.preset.selection,
            selector: Selector::new(bytes, false, budgets),
            ledger: TokenLedger::new(units.classes, experts, each, options.max_lost_token_fraction)?,
            average: LoadAverage::new(units.classes, experts, LOAD_HALF_LIFE)?,
            following: vec![Vec::new(); units.classes],
            save_interval: options.save_interval,
            stride: 1,
            measured: None,
            stored: vec![None; units.bytes.len()],
            saving: None,
            is_owed: false,
            followed: vec![false; units.num_experts()],
        })
    }

    /// Follows a plan: `active` lists the ranks that train each unit, `speeds` are the bytes per second of each rank's link.
    pub(super) fn replan(
        &mut self,
        active: &[Vec<usize>],
        copies: &Copies,
        step_seconds: f64,
        speeds: &[Option<f64>],
        units: &Units,
    ) -> Result<()> {
        self.measured = copy_budget(step_seconds, speeds).or(self.measured);
        let experts = units.num_experts();
        let kept = copies.units[..experts].iter().map(|each| each.kind == CopyKind::Replayed);
        self.selector.replan(&active[..experts], kept.collect(), speeds.len())
    }

    /// Versions in the store, by unit.
    pub(super) fn saved(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let is_stored = self.selecting == Selecting::LoadAware;
        let found = self.stored.iter().enumerate().filter(move |_| is_stored);
        found.filter_map(|(unit, stored)| stored.map(|stored| (unit, stored.version)))
    }

    pub(super) fn ledger(&self) -> &TokenLedger {
        &self.ledger
    }

    /// Bytes that may be sent to peers in a step (`moetion`).
    pub(super) fn remote_budget(&self) -> Option<u64> {
        (self.selecting == Selecting::Budget).then(|| self.selector.remote_budget(self.measured))
    }

    pub(super) fn set_stride(&mut self, steps: u64) {
        self.selector.scale_remote_budget(self.measured, steps);
        self.save_interval = (self.save_interval / steps).max(1);
        self.stride = steps;
    }

    /// Share of the followed bytes that the budget allows to send in a step.
    pub(super) fn followed_part(&self, copies: &Copies, units: &Units) -> f64 {
        let experts = copies.units[..units.num_experts()].iter();
        let kept = experts.zip(&units.bytes).filter(|(each, _)| each.kind == CopyKind::Replayed);
        let all: u64 = kept.map(|(each, &bytes)| bytes * each.holders.len() as u64).sum();
        let budget = self.selector.remote_budget(self.measured);
        if all == 0 { 1.0 } else { (budget as f64 / all as f64).min(1.0) }
    }

    fn processed(&self, unit: usize) -> i64 {
        self.ledger.seen()[unit] - self.ledger.lost()[unit]
    }

    /// `moetion`: selects the experts whose copies follow the step that begins.
    pub(super) fn begin_step(&mut self) -> Result<&Selection> {
        if self.selecting == Selecting::Budget {
            let loads = self.average.loads();
            self.following = self.selector.select_to_follow(&self.ledger, &loads, self.measured)?;
        }
        Ok(&self.following)
    }

    /// Copies experts after a step in which experts received `counts` tokens; `version` is the new state.
    pub(super) fn take_step(
        &mut self,
        counts: &[i64],
        version: u64,
        copies: Option<&mut Copies>,
        units: &Units,
    ) -> Result<StepCopies> {
        self.ledger.add(counts)?;
        self.average.add(counts)?;
        match (self.selecting, copies) {
            (Selecting::LoadAware, _) => self.save(version, units),
            (_, Some(copies)) => self.follow(version, copies, units),
            _ => Ok(StepCopies::default()),
        }
    }

    /// `pec`: saves K experts of each layer and all other state. A save that is scheduled during the previous one follows it.
    fn save(&mut self, version: u64, units: &Units) -> Result<StepCopies> {
        let is_due = self.is_owed || step_of(version).is_multiple_of(self.save_interval);
        self.is_owed = is_due && self.saving.is_some();
        if !is_due || self.is_owed {
            return Ok(StepCopies::default());
        }
        let chosen = self.selector.select_in_turn(&self.ledger)?;
        self.ledger.copied(&chosen)?;
        let copied: Vec<usize> = flat(&chosen, units.experts).chain(units.dense()).collect();
        let store_bytes = copied.iter().map(|&unit| units.bytes[unit]).sum();
        let stored = |unit: usize| {
            let processed = if unit < units.num_experts() { self.processed(unit) } else { 0 };
            (unit, Stored { version, processed })
        };
        self.saving = Some(copied.into_iter().map(stored).collect());
        Ok(StepCopies { store_bytes, peer_bytes: 0 })
    }

    /// Ends the save in progress. If it failed, the next one begins as scheduled.
    pub(super) fn end_save(&mut self, is_complete: bool) {
        self.is_owed &= is_complete;
        for (unit, stored) in self.saving.take().into_iter().flatten().filter(|_| is_complete) {
            self.stored[unit] = Some(stored);
        }
    }

    /// `moetion`: copies the experts that were selected as the step began.
    fn follow(&mut self, version: u64, copies: &mut Copies, units: &Units) -> Result<StepCopies> {
        let chosen = std::mem::replace(&mut self.following, vec![Vec::new(); units.classes]);
        self.ledger.copied(&chosen)?;
        let mut peer_bytes = 0;
        let mut followed = vec![false; units.num_experts()];
        for unit in flat(&chosen, units.experts) {
            followed[unit] = true;
            let is_next = self.followed[unit] && self.stride == 1;
            let each = if is_next { units.step_bytes(unit) } else { units.bytes[unit] };
            let kept = &mut copies.units[unit];
            peer_bytes += each * kept.holders.len() as u64;
            kept.version = Some(version);
            self.stored[unit] = Some(Stored { version, processed: self.processed(unit) });
        }
        self.followed = followed;
        Ok(StepCopies { store_bytes: 0, peer_bytes })
    }

    /// Marks all copies as current.
    pub(super) fn mark_copied(&mut self, copies: &Copies, version: u64, units: &Units) -> Result<()> {
        if self.selecting != Selecting::Budget {
            return Ok(());
        }
        let mut chosen: Selection = vec![Vec::new(); units.classes];
        for unit in 0..units.num_experts() {
            self.followed[unit] = copies.units[unit].kind == CopyKind::Replayed;
            if self.followed[unit] {
                chosen[unit / units.experts].push(unit % units.experts);
                self.stored[unit] = Some(Stored { version, processed: self.processed(unit) });
            }
        }
        self.ledger.copied(&chosen)
    }

    /// Tokens that these experts would lose if they went back to copies of these versions.
    pub(super) fn lost_tokens(&self, stale: &[(usize, u64)]) -> Vec<i64> {
        let processed = |unit: usize, version: u64| {
            self.stored[unit].filter(|stored| stored.version == version).map_or(0, |stored| stored.processed)
        };
        let lost = |&(unit, version): &(usize, u64)| (self.processed(unit) - processed(unit, version)).max(0);
        stale.iter().map(lost).collect()
    }

    /// Returns these experts to copies of these versions; returns the tokens that they lost.
    pub(super) fn lose(&mut self, stale: &[(usize, u64)], units: &Units) -> Result<f64> {
        if stale.is_empty() {
            return Ok(0.0);
        }
        let mut lost = vec![0; units.num_experts()];
        let mut experts: Selection = vec![Vec::new(); units.classes];
        for (&(unit, _), tokens) in stale.iter().zip(self.lost_tokens(stale)) {
            lost[unit] = tokens;
            experts[unit / units.experts].push(unit % units.experts);
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
