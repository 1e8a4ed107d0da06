//! What the steps of a job take, as it is arranged now.

/// What the steps of the present arrangement take.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Pace {
    /// The busiest node over the mean, over all classes.
    pub(super) imbalance: f64,
    /// Seconds by which copies delay each step.
    pub(super) copy_seconds: f64,
    /// What the planner of copies expects of that.
    pub(super) chosen_delay: f64,
    /// Bytes that are sent to peers in each step.
    pub(super) copy_bytes: u64,
    /// Seconds of the network that optimizer state takes which follows a recovery, which the next step waits for.
    pub(super) late_state: f64,
    /// Seconds of the network that the first copies take, which the next step waits for.
    pub(super) first_copies: f64,
    /// Seconds that a save which has begun takes from the next step.
    pub(super) persisting: f64,
    /// Nanoseconds of the step that runs, or was voted on last.
    pub(super) computing: u64,
}
