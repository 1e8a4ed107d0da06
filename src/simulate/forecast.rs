//! Cost of a preset in a job without failures, and of a loss at any of its steps: what `evermoe plan --copies` shows.

use super::job::Job;
use super::planners::Planners;
use super::scenario::{Scenario, Scheme};
use super::units::RankUnits;
use super::world::Progress;
use crate::engine::{Engine, Loss, StepCopies};
use crate::ensure;
use crate::error::Result;
use crate::protection::{CopyKind, Copying, Lagging, Levels, Preset, PresetName, Selecting, levels};
use crate::protocol::{step_of, version_of};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Steps of a cycle of `moetion`. If its budget needs more to copy all experts, each step stands for several.
const ROUNDS: u64 = 64;
/// Cycles before the one that counts: by then every expert has been selected.
const WARM_UP: u64 = 3;
/// Steps taken when the copies are planned: those of step 0 would count for nothing.
const FIRST: u64 = 1;
/// Maximum number of domains whose loss is computed, and of losses in a cycle.
const MAX_DOMAINS: usize = 64;
const MAX_LOSSES: u64 = 256;

/// Cost of a preset: means over the steps of a cycle, in which every unit is copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// The preset.
    pub preset: PresetName,
    /// Bytes to peers in a step.
    pub peer_bytes: f64,
    /// Bytes to the store in a step.
    pub store_bytes: f64,
    /// Steps from one copy of a unit to its next, for the worst unit; none without copies. Presets that copy nothing have
    /// their copies in the store.
    pub version_steps: Option<u64>,
    /// Seconds by which copies delay a step; none if no schedule knows it.
    pub delay_seconds: Option<f64>,
    /// Steps in which the windows alone have room for a version; none if more than 4096, or if no schedule knows it.
    pub window_steps: Option<usize>,
    /// Share of the domains after whose loss the memory of the others has a copy of every unit.
    pub survives: f64,
    /// Steps that are repeated after the loss of a domain, without the step that the loss interrupts.
    pub undone_steps: f64,
    /// Tokens that experts lose with a domain.
    pub lost_tokens: f64,
    /// Experts of each layer in a snapshot in own memory (`pec`).
    pub experts_per_snapshot: Option<usize>,
    /// Experts of each layer in a save (`pec`).
    pub experts_per_save: Option<usize>,
    /// Tokens that experts lose if all processes end and all nodes live (`pec`), with a snapshot in each step. With a snapshot
    /// every n steps they are n times as many.
    pub restart_lost_tokens: Option<f64>,
}

/// Forecasts the cost of a preset. The load is that of the first step, and the failures of the scenario do not occur.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for an invalid scenario, with the field, the value expected and the value that
/// came. Also errors of a planner.
pub fn forecast(scenario: &Scenario, preset: PresetName) -> Result<Forecast> {
    scenario.check()?;
    Scheme::Preset { name: preset }.check(scenario)?;
    let interval = scenario.session.checkpoint_interval;
    ensure!(interval > 0, "session.checkpoint_interval: expected 1 step or more, got 0");
    let preset = preset.preset();
    let planned = Planned::new(scenario, preset, None)?;
    let (pace, domain_of) = (planned.pace, planned.domain_of.clone());
    let survives = survives(&planned.engine, &domain_of);
    let units = planned.rank_units.clone();
    let state_bytes: u64 = planned.engine.units().bytes.iter().sum();
    let found = Steps::new(scenario, preset, planned).run()?;
    let is_saved = preset.needs_checkpoint_dir;
    let in_store = (preset.copying == Copying::Nothing && !is_saved).then_some(interval);
    let each = is_saved.then(|| {
        let session = &scenario.session;
        levels(scenario.model.experts, session.experts_per_snapshot, session.experts_per_save)
    });
    Ok(Forecast {
        preset: preset.name,
        peer_bytes: pace.bytes as f64 + found.peer_bytes,
        store_bytes: if is_saved { found.store_bytes } else { state_bytes as f64 / interval as f64 },
        version_steps: found.version_steps.or(in_store),
        delay_seconds: (!is_saved).then_some(pace.delay_seconds),
        window_steps: pace.window_steps.filter(|_| !is_saved),
        survives,
        undone_steps: found.undone_steps,
        lost_tokens: found.lost_tokens,
        experts_per_snapshot: each.map(|each| each.snapshot),
        experts_per_save: each.map(|each| each.save),
        restart_lost_tokens: each.map(|each| restart(scenario, preset, each, units)).transpose()?,
    })
}

/// Tokens that experts lose with all processes, but not their nodes: own memory is then the store of the experts of
/// `snapshot`, in which each step saves some.
fn restart(scenario: &Scenario, preset: &'static Preset, each: Levels, units: Vec<RankUnits>) -> Result<f64> {
    let mut own = scenario.clone();
    own.session.experts_per_save = Some(each.snapshot);
    own.session.save_interval = 1;
    let mut planned = Planned::new(&own, preset, Some(units))?;
    planned.domain_of.fill(0);
    Ok(Steps::new(&own, preset, planned).run()?.lost_tokens)
}

/// The planners of a job whose step takes the same time with any load.
struct EvenLoads;

impl Planners for EvenLoads {
    fn imbalance(&self, _: &[i64], _: &[f64], _: usize, _: crate::dispatch::Policy) -> Result<f64> {
        Ok(1.0)
    }
}

/// A job that has planned its copies and has made the first ones.
struct Planned {
    engine: Engine,
    pace: crate::engine::Pace,
    rank_units: Vec<RankUnits>,
    /// Tokens of each expert in a step.
    tokens: Vec<f64>,
    /// Number of the domain of each node.
    domain_of: Vec<usize>,
}

impl Planned {
    fn new(scenario: &Scenario, preset: &'static Preset, units: Option<Vec<RankUnits>>) -> Result<Self> {
        let mut quiet = |_| Ok(());
        let quiet: &mut Progress<'_> = &mut quiet;
        let nodes: BTreeSet<usize> = (0..scenario.cluster.nodes).collect();
        let planners: &dyn Planners =
            if scenario.model.expert_share > 0.0 { &super::planners::Product } else { &EvenLoads };
        let mut job = Job::new(scenario, preset, planners, (nodes.clone(), &[]), 0, quiet)?;
        job.agreed = nodes.into_iter().collect();
        job.host_speed = Some(scenario.costs.capture_bytes_per_second);
        let (nobody, first) = (vec![None; job.agreed.len()], version_of(0, FIRST));
        let rank_units = units.map_or_else(|| job.place(&nobody, first), Ok)?;
        job.adopt(first, rank_units);
        job.protect(first, true)?;
        job.engine.resume(first)?;
        let tokens = scenario.model.tokens_per_step as f64;
        let tokens = job.loads.shares().iter().map(|share| share * tokens).collect();
        let mut domains = BTreeMap::new();
        let domain_of = job.agreed.iter().map(|&node| {
            let next = domains.len();
            *domains.entry(job.domain_of(node)).or_insert(next)
        });
        let domain_of = domain_of.collect();
        Ok(Self { domain_of, tokens, pace: job.pace.copies, rank_units: job.rank_units, engine: job.engine })
    }
}

/// Share of the domains whose loss leaves a copy of every unit in memory.
fn survives(engine: &Engine, domain_of: &[usize]) -> f64 {
    let mut needed = BTreeSet::new();
    for (unit, active) in engine.active().iter().enumerate() {
        let keepers = engine.copies().into_iter().flat_map(|copies| copies.units[unit].keepers());
        let mut domains = active.iter().copied().chain(keepers).map(|node| domain_of[node]);
        let first = domains.next();
        if domains.all(|domain| Some(domain) == first) {
            needed.extend(first);
        }
    }
    let domains = domain_of.iter().max().map_or(1, |last| last + 1);
    1.0 - needed.len() as f64 / domains as f64
}

/// Means over a cycle.
#[derive(Clone, Copy, Debug, Default)]
struct Means {
    peer_bytes: f64,
    store_bytes: f64,
    version_steps: Option<u64>,
    undone_steps: f64,
    lost_tokens: f64,
}

/// Steps without failures.
struct Steps<'a> {
    scenario: &'a Scenario,
    preset: &'static Preset,
    engine: Engine,
    tokens: Vec<f64>,
    domains: Vec<Vec<usize>>,
    /// Steps of the job for which each step stands.
    stride: u64,
    /// Strides after which all copies have been made again.
    cycle: u64,
    taken: u64,
    /// Version of the copies of each unit, and the strides since it changed.
    versions: Vec<(Option<u64>, u64)>,
}

impl<'a> Steps<'a> {
    fn new(scenario: &'a Scenario, preset: &'static Preset, planned: Planned) -> Self {
        let Planned { mut engine, tokens, domain_of, .. } = planned;
        let mut domains: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        domain_of
            .into_iter()
            .enumerate()
            .for_each(|(node, domain)| domains.entry(domain).or_default().push(node));
        let domains: Vec<Vec<usize>> = domains.into_values().collect();
        let some = domains.len().min(MAX_DOMAINS);
        let domains = (0..some).map(|number| domains[number * domains.len() / some].clone()).collect();
        let (stride, cycle) = cycle(&engine, scenario, preset);
        engine.set_stride(stride);
        let versions = vec![(None, 0); engine.units().bytes.len()];
        Self { scenario, preset, engine, tokens, domains, stride, cycle, taken: FIRST, versions }
    }

    /// Takes steps until all copies have been made several times; returns the means of the last cycle.
    fn run(mut self) -> Result<Means> {
        for _ in 0..WARM_UP * self.cycle {
            self.take_step()?;
            self.age();
        }
        let mut found = Means::default();
        let (mut oldest, mut is_copied) = (0, false);
        let each = (MAX_LOSSES / self.cycle).clamp(1, self.domains.len() as u64);
        let newer = (self.stride - 1) as f64 / (2 * self.stride) as f64; // mean share of the next stride that is taken
        for number in 0..self.cycle {
            let lost = some_domains(number * each, each, self.domains.len() as u64);
            if self.stride > 1 {
                let mut later = self.engine.clone(); // without copies of the next stride
                later.take_step(version_of(0, self.taken + 1), || self.counts())?;
                self.add_losses(&mut found, &later, &lost, newer)?;
            }
            let made = self.take_step()?;
            found.peer_bytes += made.peer_bytes as f64;
            found.store_bytes += made.store_bytes as f64;
            self.add_losses(&mut found, &self.engine, &lost, 1.0 - newer)?;
            let (age, has_changed) = self.age();
            (oldest, is_copied) = (age.max(oldest), is_copied || has_changed);
        }
        let (steps, losses) = ((self.cycle * self.stride) as f64, (self.cycle * each) as f64);
        Ok(Means {
            peer_bytes: found.peer_bytes / steps,
            store_bytes: found.store_bytes / steps,
            version_steps: is_copied.then_some(oldest * self.stride),
            undone_steps: found.undone_steps / losses,
            lost_tokens: found.lost_tokens / losses,
        })
    }

    /// Tokens of all experts in a stride.
    ///
    /// In the first one every expert has some, so that the store gets the experts that have none from then on.
    fn counts(&self) -> Vec<i64> {
        let least = i64::from(self.taken == FIRST && self.preset.needs_checkpoint_dir);
        let stride = self.stride as f64;
        self.tokens.iter().map(|tokens| ((tokens * stride).round() as i64).max(least)).collect()
    }

    fn take_step(&mut self) -> Result<StepCopies> {
        self.engine.begin_step()?;
        let (version, counts) = (version_of(0, self.taken + 1), self.counts());
        let made = self.engine.take_step(version, || counts)?;
        self.engine.end_save(true);
        self.taken += 1;
        Ok(made)
    }

    /// Adds the cost of the loss of each of these domains.
    fn add_losses(&self, found: &mut Means, engine: &Engine, lost: &[usize], weight: f64) -> Result<()> {
        let (mut undone, mut tokens) = (0.0, 0.0);
        for &domain in lost {
            let cost = self.cost(&engine.if_lost(&self.domains[domain])?);
            (undone, tokens) = (undone + cost.0, tokens + cost.1);
        }
        found.undone_steps += weight * undone;
        found.lost_tokens += weight * tokens;
        Ok(())
    }

    /// Steps that are repeated, and tokens that are lost.
    ///
    /// If no version is left, all go back to the newest checkpoint. An expert that may lag does not go back further.
    fn cost(&self, loss: &Loss) -> (f64, f64) {
        let (session, stride) = (&self.scenario.session, self.stride as f64);
        let is_saved = self.preset.needs_checkpoint_dir;
        let interval = if is_saved { session.save_interval } else { session.checkpoint_interval };
        let stored = (interval - 1) as f64 / 2.0;
        let Some(version) = loss.version else { return (stored, 0.0) };
        let undone = loss.undone_steps as f64 * stride;
        let most = if self.preset.lagging == Lagging::Always && !is_saved { stored } else { f64::INFINITY };
        let lost = loss.stale.iter().enumerate().map(|(index, &(unit, at))| {
            let tokens = self.tokens[unit];
            let since = match &loss.lost_tokens {
                Some(lost) => lost[index] as f64 - undone * tokens, // those of repeated steps are not lost
                None => (step_of(version) - step_of(at)) as f64 * stride * tokens,
            };
            since.clamp(0.0, most * tokens)
        });
        (undone, lost.sum())
    }

    /// Counts a stride since the latest copy of each unit; returns the most of them up to a copy or until now, and whether a
    /// copy was made.
    fn age(&mut self) -> (u64, bool) {
        let now = self.copied();
        let experts = self.engine.units().num_experts();
        let (mut oldest, mut has_changed) = (0, false);
        for (unit, ((before, age), now)) in self.versions.iter_mut().zip(now).enumerate() {
            let counts = unit >= experts || self.tokens[unit] > 0.0;
            if now.is_some() && counts {
                oldest = oldest.max(*age + 1);
            }
            has_changed |= *before != now && counts;
            *age = if *before == now { *age + 1 } else { 0 };
            *before = now;
        }
        (oldest, has_changed)
    }

    /// Version of the copies of each unit, on peers or saved one by one.
    fn copied(&self) -> Vec<Option<u64>> {
        let engine = &self.engine;
        let mut found = vec![None; engine.units().bytes.len()];
        for (unit, version) in engine.saved() {
            found[unit] = Some(version);
        }
        for (unit, each) in engine.copies().into_iter().flat_map(|copies| copies.units.iter().enumerate()) {
            if !each.holders.is_empty() {
                found[unit] = engine.copies().map(|copies| copies.version(unit, engine.history()));
            }
        }
        found
    }
}

/// `each` of the domains, from the `next`-th loss on: all in turn, each one step later than in the previous turn.
fn some_domains(next: u64, each: u64, domains: u64) -> Vec<usize> {
    (next..next + each).map(|loss| ((loss + each * (loss / domains)) % domains) as usize).collect()
}

/// Steps for which one stands, and the number of these after which all copies have been made again.
fn cycle(engine: &Engine, scenario: &Scenario, preset: &Preset) -> (u64, u64) {
    let (units, session) = (engine.units(), &scenario.session);
    let Some(copies) = engine.copies() else { return (1, 1) };
    match preset.selection {
        Selecting::LoadAware => {
            let each = levels(units.experts, session.experts_per_snapshot, session.experts_per_save).save;
            (session.save_interval, units.experts.div_ceil(each) as u64)
        }
        Selecting::Budget => {
            let experts = copies.units[..units.num_experts()].iter().zip(&units.bytes);
            let followed: u64 =
                experts.filter(|(each, _)| each.kind == CopyKind::Replayed).map(|(_, bytes)| bytes).sum();
            let budget = engine.remote_budget().unwrap_or(0).max(1);
            let largest = units.bytes[..units.num_experts()].iter().max();
            if largest.is_some_and(|&bytes| bytes > budget) {
                return (session.checkpoint_interval, 1); // the checkpoint is newer than the first copies
            }
            (followed.div_ceil(budget).div_ceil(ROUNDS).max(1), ROUNDS)
        }
        Selecting::All if copies.is_late() => (1, copies.steps),
        Selecting::All => {
            let periods = copies.units.iter().map(|each| each.kind.period() as u64);
            (1, periods.fold(1, |all, period| all / greatest_divisor(all, period) * period))
        }
    }
}

fn greatest_divisor(one: u64, two: u64) -> u64 {
    if two == 0 { one } else { greatest_divisor(two, one % two) }
}
