//! Durations and bytes of a job's steps under the current plan.

use crate::engine;

/// Durations and bytes of the current plan's steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Pace {
    /// Load of the busiest node over the mean, over all classes.
    pub(super) imbalance: f64,
    /// Cost of the copies.
    pub(super) copies: engine::Pace,
    /// Network seconds of optimizer state that follows a recovery; the next step waits for it.
    pub(super) late_state: f64,
    /// Network seconds of the first copies; the next step waits for them.
    pub(super) first_copies: f64,
    /// Seconds by which a save in progress delays the next step.
    pub(super) persisting: f64,
    /// Nanoseconds of the current step, or of the one in the latest vote.
    pub(super) computing: u64,
}
