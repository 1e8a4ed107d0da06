//! What a loss of nodes costs: the version that is left, and the experts that go back alone.

use super::copies::Copies;
use super::core::Engine;
use crate::error::Result;
use crate::protection::Lagging;
use crate::protocol::step_of;
use crate::recovery::{Plan, plan_version};
use std::collections::BTreeSet;

/// Cost of a loss of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// The version from which the others continue; none if no version of all units is left.
    pub version: Option<u64>,
    /// Steps that were taken after this version; all of them if none is left.
    pub undone_steps: u64,
    /// Experts that go back alone, with the version of each.
    pub stale: Vec<(usize, u64)>,
    /// Tokens that each of these experts has processed since its version; none if no ledger counts them.
    pub lost_tokens: Option<Vec<i64>>,
}

impl Engine {
    /// What is lost if these nodes are lost now, between two votes.
    ///
    /// # Errors
    /// None for the copies of a plan.
    pub fn if_lost(&self, nodes: &[usize]) -> Result<Loss> {
        let lost: BTreeSet<usize> = nodes.iter().copied().collect();
        let is_left = |unit: usize| self.active[unit].iter().any(|node| !lost.contains(node));
        let all: Vec<usize> = (0..self.units.bytes.len()).collect();
        let gone: Vec<usize> = all.iter().copied().filter(|&unit| !is_left(unit)).collect();
        let mut found = Loss { version: Some(self.history.newest), ..Loss::default() };
        for units in [&gone, &all].into_iter().filter(|_| !gone.is_empty()) {
            let Plan { version, stale, .. } = self.plan_units(&lost, units)?;
            (found.version, found.stale) = (version, stale);
            if version == Some(self.history.newest) {
                break; // the units that are left have it, too
            }
        }
        found.undone_steps = step_of(self.history.newest) - found.version.map_or(0, step_of);
        found.lost_tokens = self.turns.as_ref().map(|turns| turns.lost_tokens(&found.stale));
        Ok(found)
    }

    /// Plans a recovery of these units alone, ascending, without the lost nodes.
    fn plan_units(&self, lost: &BTreeSet<usize>, units: &[usize]) -> Result<Plan> {
        let mut number = vec![None; self.units.bytes.len()];
        units.iter().enumerate().for_each(|(index, &unit)| number[unit] = Some(index));
        let is_left = |unit: usize| self.active[unit].iter().any(|node| !lost.contains(node));
        let trained = units.iter().filter(|&&unit| is_left(unit)).map(|&unit| (self.history.newest, unit));
        let copied = |copies: &Copies| copies.held_of(units.iter().copied(), &self.history);
        let copied = self.copies().map(copied).unwrap_or_default().into_iter();
        let copied = copied.filter(|(_, node, ..)| !lost.contains(node)).map(|(unit, _, at, _)| (at, unit));
        let saved = self.saved().map(|(unit, at)| (at, unit));
        let held = trained.chain(copied).chain(saved);
        let held: Vec<(u64, usize)> = held.filter_map(|(at, unit)| Some((at, number[unit]?))).collect();
        let (mut found, _) = self.version_left(|may_lag| {
            let may_lag: Vec<usize> = may_lag.iter().filter_map(|&unit| number[unit]).collect();
            Ok(plan_version(units.len(), held.clone(), &may_lag))
        })?;
        found.stale.iter_mut().for_each(|(index, _)| *index = units[*index]);
        Ok(found)
    }

    /// The version that `plan` finds for experts that may lag, without lagging ones if the preset prefers that; and
    /// whether they may lag.
    ///
    /// # Errors
    /// Those of `plan`.
    pub fn version_left(&self, plan: impl Fn(&[usize]) -> Result<Plan>) -> Result<(Plan, bool)> {
        let lagging = self.options.preset.lagging;
        if lagging != Lagging::Always {
            let first = plan(&[])?;
            if first.version.is_some() || lagging == Lagging::Never || self.options.replication == 0 {
                return Ok((first, false));
            }
        }
        let experts: Vec<usize> = (0..self.units.num_experts()).collect();
        Ok((plan(&experts)?, true))
    }
}
