//! Simulation of a job on a cluster that fails: the product's own planners and protocol decide, in simulated time.
//!
//! ```text
//! sources ─ changes ─ World (clock, nodes) ◄─ spend(cause, seconds) ─┐
//!                                                                    │
//! Members: protocol::Protocol ─ commands ─► Job: ask, connect, restore, protect, step ─ events ─► Members
//!                                            │ Planners: allocate, place, ranks_in_place, plan_protection, plan_recovery, …
//!                                            └─► Tally ─ Outcome: time by cause, steps, tokens, bytes
//! forecast: place, protect ─ Engine: steps without failures, if_lost at each ─ Forecast: bytes, delay, mean losses
//! ```
//!
//! A node is one member. One state machine represents all members in the same state, and one layer represents all
//! layers with the same load. Only the *cost* of decisions is modelled, by [`Costs`]; the decisions themselves come
//! from the planners.

mod account;
mod asking;
mod costs;
mod failures;
mod forecast;
mod job;
mod load;
mod member;
mod outcome;
mod pace;
mod planners;
mod protect;
mod ranges;
mod rearrange;
mod restart;
mod restore;
mod scenario;
mod steps;
mod trace;
mod units;
mod world;

pub use costs::Costs;
pub use failures::Source;
pub use forecast::{Forecast, forecast};
pub use outcome::{Happened, Outcome};
pub use planners::{Planners, Product};
pub use scenario::{Cluster, Dense, Load, Model, RestartChoices, Scenario, Scheme, SessionChoices};
pub use trace::{read_bamboo, read_skypilot};
pub use world::Progress;

use crate::error::Result;
use failures::changes;

/// Simulates a scheme. The seed decides the failures and the drift of the load, the same for all schemes.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for an invalid scenario, with the field, the value expected and the
/// value that came. Also errors of a planner, and errors that `progress` returns.
pub fn simulate(
    scenario: &Scenario,
    scheme: &Scheme,
    seed: u64,
    planners: &dyn Planners,
    progress: &mut Progress<'_>,
) -> Result<Outcome> {
    scenario.check()?;
    scheme.check(scenario)?;
    let trainers = scenario.cluster.nodes;
    let nodes = [trainers, trainers + scenario.cluster.spares];
    let ready = scenario.costs.start_seconds;
    let (present, changes) = changes(&scenario.failures, nodes, scenario.seconds, ready, seed);
    let begin = (present, &changes[..]);
    match scheme {
        Scheme::Preset { name } => {
            job::Job::new(scenario, name.preset(), planners, begin, seed, progress)?.run()
        }
        Scheme::Restart(choices) => restart::Restarts::new(scenario, choices, begin, seed, progress).run(),
    }
}
