//! Greedy choice of copies: the choice that saves the most tokens per second of links comes first.

use super::capacity::{Capacity, Cost};
use super::options::{Choice, Risk, hull};
use super::plan::{CopyKind, CopyPlan, CopyReason, Holder, Limit, LossSurvival, UnitChoice};
use super::request::CopyRequest;
use super::summary::summary;
use crate::error::Result;
use crate::placement::{primaries, survival, unit_copy_holders};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Chooses the protection of each unit: by the nodes that train on it, replayed copies, snapshots every n steps, or
/// none.
///
/// The goal is that every loss of fewer than `copies` domains is survived without a lost step. Each unit that fewer
/// domains train on gets copies on further domains, in the form that takes the fewest seconds of links: the gradient of
/// each step (no bytes if the unit is idle), or its state. Copies are sent in idle windows, and beyond them within
/// `budget` of a step. If not all of them fit, expected lost tokens decide: greedily, along the convex hull of each
/// unit's choices, the step that saves the most tokens per second of links is taken. Then the remaining capacity is
/// filled, and pairs of units exchange capacity while that reduces the loss. A packing by size is tried as well, and
/// the better result is taken.
///
/// Every transfer takes `alpha + bytes / beta` seconds of the network at both ends, and once of the sender's host link.
/// A copy is kept in host memory; if there is no room, a replayed copy may be in device memory, over the holder's host
/// link. A snapshot every n steps is sent in n parts and takes its memory twice, as a version becomes visible only when
/// it is complete. A replayed copy takes the state and `log_steps` gradients.
///
/// ```
/// use evermoe::schedule::Link;
/// use evermoe::protection::{CopyKind, CopyNode, CopyRequest, CopyUnit, choose_copies};
/// let node = |domain| CopyNode {
///     failure: 1e-4, domain, host_bytes: 4000, device_bytes: 0, network_seconds: 0.2, host_link_seconds: 0.2,
/// };
/// let unit = |active: &[usize], replayable| CopyUnit {
///     state_bytes: 1200, gradient_bytes: 200, active: active.to_vec(), tokens: 64.0, replayable,
/// };
/// // On 0 and 1: enough. On 0, then 2: 200 bytes a step. On 1, no replay: 1200 bytes would take 0.12 s.
/// let units = [unit(&[0, 1], true), unit(&[0], true), unit(&[2], true), unit(&[1], false)];
/// let request = CopyRequest {
///     units: &units,
///     nodes: &[node(0), node(1), node(2), node(3)],
///     network: Link { alpha: 0.0, beta: 1e4 },
///     host_link: Link { alpha: 0.0, beta: 1e5 },
///     step_seconds: 1.0,
///     copies: 2,
///     budget: 0.01,
///     max_period: 64,
///     persist_period: 1000,
///     log_steps: 4,
/// };
/// let plan = choose_copies(&request)?;
/// let kinds: Vec<&str> = plan.units.iter().map(|unit| unit.kind.name()).collect();
/// assert_eq!(kinds, ["active", "replayed", "replayed", "snapshot"]);
/// let sent: u64 = plan.nodes.iter().map(|node| node.sent_bytes).sum();
/// assert_eq!((sent, plan.delay_seconds), (200 + 200 + 1200, 0.0));
/// // With half of the time, there is a snapshot every second step.
/// let slow = [CopyNode { network_seconds: 0.08, ..node(0) }, CopyNode { network_seconds: 0.08, ..node(1) }, node(2), node(3)];
/// let plan = choose_copies(&CopyRequest { nodes: &slow, ..request })?;
/// assert_eq!(plan.units[3].kind, CopyKind::Snapshot { period: 2 });
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) naming the field, the unit or the node.
pub fn choose_copies(request: &CopyRequest<'_>) -> Result<CopyPlan> {
    request.check()?;
    let by_saving = {
        let mut chooser = Chooser::new(request)?;
        chooser.by_saving();
        chooser.fill();
        chooser.improve();
        chooser
    };
    if by_saving.quality().0 == 0 {
        return by_saving.plan();
    }
    let mut by_size = Chooser::new(request)?;
    by_size.by_size();
    by_size.fill();
    by_size.improve();
    let (a, b) = (by_saving.quality(), by_size.quality());
    // All covered, or else the least expected loss.
    let better = (b.0 == 0).cmp(&(a.0 == 0)).then(a.1.total_cmp(&b.1)).then(a.0.cmp(&b.0));
    if better == Ordering::Greater { by_size.plan() } else { by_saving.plan() }
}

/// The choices of a unit, and the current one.
pub(super) struct Unit {
    pub(super) active: Vec<usize>,
    pub(super) sender: usize,
    /// Nodes on fresh domains that should hold the copies, by `unit_copy_holders`.
    pub(super) preferred: Vec<usize>,
    /// Domains that should hold it besides the active ones.
    pub(super) missing: usize,
    pub(super) choices: Vec<Choice>,
    pub(super) kind: CopyKind,
    pub(super) holders: Vec<Holder>,
    pub(super) loss: f64,
}

impl Unit {
    pub(super) fn covered(&self) -> bool {
        self.missing == 0 || (self.holders.len() == self.missing && self.kind.period() == 1)
    }

    fn cover(&self) -> impl Iterator<Item = Choice> {
        self.choices.iter().filter(|choice| choice.covers).copied()
    }
}

/// The next step along a unit's hull.
struct Step {
    saves: f64,
    unit: usize,
    position: usize,
}

impl Ord for Step {
    fn cmp(&self, other: &Self) -> Ordering {
        self.saves.total_cmp(&other.saves).then(other.unit.cmp(&self.unit))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Step {}

pub(super) struct Chooser<'a> {
    pub(super) request: &'a CopyRequest<'a>,
    pub(super) risk: Risk<'a>,
    pub(super) domain: Vec<usize>,
    capacity: Capacity<'a>,
    pub(super) units: Vec<Unit>,
}

impl<'a> Chooser<'a> {
    fn new(request: &'a CopyRequest<'a>) -> Result<Self> {
        let (domain, failure) = request.domains();
        let risk = Risk { request, failure };
        let active: Vec<Vec<usize>> = request.units.iter().map(|unit| unit.active.clone()).collect();
        // What is sent is divided among senders; holders are those of the copy placement, with domains for nodes.
        let sent: Vec<u64> = request.units.iter().map(sent_bytes).collect();
        let senders = primaries(&active, &sent, request.nodes.len())?;
        let copies = request.copies.min(risk.failure.len().max(1));
        let holders = unit_copy_holders(&senders, &active, &domain, copies)?;
        let mut units = Vec::with_capacity(active.len());
        for (index, unit) in request.units.iter().enumerate() {
            let mut domains: Vec<usize> = unit.active.iter().map(|&node| domain[node]).collect();
            domains.sort_unstable();
            domains.dedup();
            let mut taken = domains.clone();
            let mut preferred = holders[index].clone();
            preferred.retain(|&node| {
                let fresh = !taken.contains(&domain[node]);
                taken.push(domain[node]);
                fresh
            });
            let missing = request.copies.saturating_sub(domains.len());
            let fresh: Vec<usize> = preferred.iter().map(|&node| domain[node]).collect();
            let choices = risk.choices(unit, &domains, missing, &fresh);
            let kind = if missing == 0 { CopyKind::Active } else { CopyKind::Uncovered };
            let loss = risk.loss(unit, kind, &domains, &[]);
            let holders = Vec::new();
            units.push(Unit {
                active: domains,
                sender: senders[index],
                preferred,
                missing,
                choices,
                kind,
                holders,
                loss,
            });
        }
        Ok(Self { request, risk, domain, capacity: Capacity::new(request), units })
    }

    /// Walks along the hulls, first the step that saves the most tokens for a second.
    fn by_saving(&mut self) {
        let hulls: Vec<Vec<(f64, Choice)>> =
            self.units.iter().map(|unit| hull(&unit.choices, unit.loss)).collect();
        let step = |unit: usize, position: usize| {
            hulls[unit].get(position).map(|&(saves, _)| Step { saves, unit, position })
        };
        let mut steps: BinaryHeap<Step> = (0..self.units.len()).filter_map(|unit| step(unit, 0)).collect();
        while let Some(Step { unit, position, .. }) = steps.pop() {
            // Choices further along the hull take other memory, so they are tried even if this one does not fit.
            let _ = self.choose(unit, hulls[unit][position].1);
            steps.extend(step(unit, position + 1));
        }
    }

    /// Covers units with the first choice that fits, largest units first.
    fn by_size(&mut self) {
        let size = |unit: &Unit| unit.cover().next().map_or(0.0, |choice| choice.seconds);
        let mut order: Vec<usize> = (0..self.units.len()).collect();
        order.sort_by(|&a, &b| size(&self.units[b]).total_cmp(&size(&self.units[a])).then(a.cmp(&b)));
        for unit in order {
            let choices: Vec<Choice> = self.units[unit].cover().collect();
            let _ = choices.into_iter().any(|choice| self.choose(unit, choice).is_ok());
        }
    }

    /// Gives the remaining capacity to the units that lose the most: choices that cover them, or else those that lose
    /// the least.
    fn fill(&mut self) {
        let mut order: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !self.units[unit].covered()).collect();
        order.sort_by(|&a, &b| self.units[b].loss.total_cmp(&self.units[a].loss).then(a.cmp(&b)));
        for unit in order {
            let choices = self.better(unit);
            let _ = choices.into_iter().any(|choice| self.choose(unit, choice).is_ok());
        }
    }

    /// Removes all copies of a unit.
    pub(super) fn clear(&mut self, index: usize) {
        let request = &self.request.units[index];
        let unit = &mut self.units[index];
        self.capacity.remove(unit.sender, &unit.holders, Cost::new(self.request, request, unit.kind));
        (unit.kind, unit.holders) = (CopyKind::Uncovered, Vec::new());
        unit.loss = self.risk.loss(request, unit.kind, &unit.active, &[]);
    }

    pub(super) fn save(&self, index: usize) -> (CopyKind, Vec<Holder>, f64) {
        let unit = &self.units[index];
        (unit.kind, unit.holders.clone(), unit.loss)
    }

    /// Restores a unit to the choice that `save` returned, for which there is capacity.
    pub(super) fn restore(&mut self, index: usize, saved: &(CopyKind, Vec<Holder>, f64)) {
        self.clear(index);
        let unit = &mut self.units[index];
        (unit.kind, unit.holders, unit.loss) = saved.clone();
        self.capacity.add(
            unit.sender,
            &unit.holders,
            Cost::new(self.request, &self.request.units[index], unit.kind),
        );
    }

    /// Replaces the unit's choice, if there is capacity for the new one.
    pub(super) fn choose(&mut self, index: usize, choice: Choice) -> std::result::Result<(), Limit> {
        let request = &self.request.units[index];
        let Unit { sender, kind, .. } = self.units[index];
        let before = (Cost::new(self.request, request, kind), std::mem::take(&mut self.units[index].holders));
        self.capacity.remove(sender, &before.1, before.0);
        let cost = Cost::new(self.request, request, choice.kind);
        let found = self.holders(index, cost, choice.holders);
        let unit = &mut self.units[index];
        let Ok(holders) = found else {
            self.capacity.add(sender, &before.1, before.0);
            unit.holders = before.1;
            return found.map(|_| ());
        };
        self.capacity.add(sender, &holders, cost);
        let domains: Vec<usize> = holders.iter().map(|holder| self.domain[holder.node]).collect();
        unit.loss = self.risk.loss(request, choice.kind, &unit.active, &domains);
        (unit.kind, unit.holders) = (choice.kind, holders);
        Ok(())
    }

    /// `count` nodes on fresh domains with capacity, the preferred ones first, then those with the least traffic.
    fn holders(&self, index: usize, cost: Cost, count: usize) -> std::result::Result<Vec<Holder>, Limit> {
        let unit = &self.units[index];
        self.capacity.sender(unit.sender, cost, count)?;
        let mut taken = unit.active.clone();
        let mut holders = Vec::with_capacity(count);
        let mut limit = None;
        for &node in &unit.preferred {
            match self.capacity.holder(node, cost) {
                _ if holders.len() == count => break,
                Ok(holder) => {
                    taken.push(self.domain[node]);
                    holders.push(holder);
                }
                Err(found) => limit = limit.or(Some(found)),
            }
        }
        while holders.len() < count {
            let fresh = (0..self.domain.len()).filter(|&node| !taken.contains(&self.domain[node]));
            let fitting = fresh.filter_map(|node| self.capacity.holder(node, cost).ok());
            let traffic = |holder: &Holder| self.capacity.used[holder.node].network_seconds;
            let best = fitting.min_by(|a, b| traffic(a).total_cmp(&traffic(b)).then(a.node.cmp(&b.node)));
            let Some(holder) = best else { return Err(limit.unwrap_or(Limit::Domains)) };
            taken.push(self.domain[holder.node]);
            holders.push(holder);
        }
        Ok(holders)
    }

    /// Number of units that could be covered and are not, and the expected loss.
    fn quality(&self) -> (usize, f64) {
        let open = self.units.iter().filter(|unit| !unit.covered() && unit.cover().next().is_some());
        (open.count(), self.lost_tokens())
    }

    fn lost_tokens(&self) -> f64 {
        self.units.iter().fold(0.0, |sum, unit| sum + unit.loss)
    }

    fn plan(mut self) -> Result<CopyPlan> {
        let units: Vec<UnitChoice> = (0..self.units.len()).map(|index| self.unit_choice(index)).collect();
        let delay = (0..self.domain.len()).map(|node| self.capacity.delay(node)).fold(0.0, f64::max);
        let lost_tokens = self.lost_tokens();
        let survival = self.survival()?;
        let summary = summary(self.request, &units, &self.capacity.used, delay);
        Ok(CopyPlan {
            units,
            nodes: self.capacity.used,
            delay_seconds: delay,
            lost_tokens,
            survival,
            summary,
        })
    }

    fn unit_choice(&mut self, index: usize) -> UnitChoice {
        let reason = self.reason(index);
        let unit = &self.units[index];
        let cost = Cost::new(self.request, &self.request.units[index], unit.kind);
        let most = if unit.holders.is_empty() { self.request.persist_period } else { unit.kind.period() };
        UnitChoice {
            kind: unit.kind,
            sender: unit.sender,
            holders: unit.holders.clone(),
            bytes: cost.bytes * unit.holders.len() as u64,
            memory_bytes: cost.memory * unit.holders.len() as u64,
            covered: unit.covered(),
            most_lost_steps: most - 1,
            lost_tokens: unit.loss,
            reason,
        }
    }

    fn reason(&mut self, index: usize) -> CopyReason {
        if !self.units[index].covered() {
            return CopyReason::Limited(self.limit(index));
        }
        let (unit, given) = (&self.units[index], &self.request.units[index]);
        if unit.missing == 0 {
            return CopyReason::HeldActively { domains: unit.active.len() };
        }
        match unit.kind {
            CopyKind::Replayed if given.gradient_bytes == 0 => CopyReason::Idle,
            CopyKind::Replayed if given.gradient_bytes < given.state_bytes => CopyReason::GradientIsSmaller,
            CopyKind::Replayed => CopyReason::SnapshotHasNoRoom,
            _ if !given.replayable => CopyReason::NotReplayable,
            _ if given.state_bytes <= given.gradient_bytes => CopyReason::StateIsSmaller,
            _ => CopyReason::ReplayHasNoRoom,
        }
    }

    /// Reason why the cheapest choice that would cover the unit has no capacity.
    fn limit(&mut self, index: usize) -> Limit {
        let unit = &self.units[index];
        let Some(choice) = unit.cover().next() else { return Limit::Domains };
        let (sender, kind, holders) = (unit.sender, unit.kind, unit.holders.clone());
        let cost = |kind| Cost::new(self.request, &self.request.units[index], kind);
        self.capacity.remove(sender, &holders, cost(kind));
        let found = self.holders(index, cost(choice.kind), choice.holders);
        self.capacity.add(sender, &holders, cost(kind));
        found.err().unwrap_or(Limit::Time { node: sender })
    }

    fn survival(&self) -> Result<Vec<LossSurvival>> {
        let domains = self.risk.failure.len();
        let with = |old: bool| -> Vec<Vec<usize>> {
            let copied = |unit: &Unit| -> Vec<usize> {
                let counts = old || unit.kind.period() == 1;
                unit.holders.iter().filter(|_| counts).map(|holder| self.domain[holder.node]).collect()
            };
            let mut sets: Vec<Vec<usize>> =
                self.units.iter().map(|unit| [unit.active.clone(), copied(unit)].concat()).collect();
            sets.iter_mut().for_each(|set| set.sort_unstable());
            sets.sort_unstable();
            sets.dedup();
            sets
        };
        let (current, any) = (with(false), with(true));
        let one = |failures: usize| {
            Ok(LossSurvival {
                failures,
                without_loss: survival(domains, &current, failures, None, 0)?,
                with_loss: survival(domains, &any, failures, None, 0)?,
            })
        };
        (1..=self.request.copies.min(domains)).map(one).collect()
    }
}

/// Bytes that a unit's cheapest current copy sends.
fn sent_bytes(unit: &super::request::CopyUnit) -> u64 {
    if unit.replayable { unit.gradient_bytes.min(unit.state_bytes) } else { unit.state_bytes }
}
