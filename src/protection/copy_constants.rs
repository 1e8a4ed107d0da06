//! Constants of copies: one definition for sessions, forecasts of memory, `evermoe plan` and the simulator.

/// Versions of its own snapshots that a rank has room for.
pub const OWN_VERSIONS: u64 = 2;
/// Bytes that a logged gradient counts for in addition to its own, at most.
pub const RECORD_BYTES: u64 = 256;
/// Steps that a replica repeats in one pass, at most.
pub const BATCH_STEPS: u64 = 8;
/// Bytes of the float32 gradients of one pass, at most.
pub const BATCH_BYTES: u64 = 128 << 20;
/// Logged steps in addition to a batch: the newest, which can still be undone, and the one that is voted on.
pub const LOGGED_STEPS: u64 = 2;
/// Gradients that a replica's log has room for: a batch that is being repeated, the newest steps, and as many on their way.
pub const LOG_STEPS: u64 = BATCH_STEPS + 2 * LOGGED_STEPS;
/// Steps between two snapshots of a unit, at most.
pub const MAX_PERIOD: usize = 64;
/// Probability that a node fails in a step, where none is known; the same for all, it only weighs units against each other.
pub const FAILURE: f64 = 1e-4;

/// Steps of a parameter with this number of elements that a replica repeats in one pass.
///
/// ```
/// use evermoe::protection::{BATCH_STEPS, batch_steps};
/// assert_eq!((batch_steps(0), batch_steps(1 << 25), batch_steps(1 << 30)), (BATCH_STEPS, 1, 1));
/// assert_eq!(batch_steps(1 << 23), 4);
/// ```
pub fn batch_steps(elements: u64) -> u64 {
    (BATCH_BYTES / elements.saturating_mul(4).max(1)).clamp(1, BATCH_STEPS)
}
