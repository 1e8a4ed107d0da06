//! Versions of the state: `generation << STEP_BITS | step`. Of two histories, the one of the newer membership wins.

/// Bits of a version that count steps.
pub const STEP_BITS: u32 = 40;

/// Returns the version after `step` steps, the last of them taken by the members of `generation`.
///
/// Step 5 of generation 2 is 2 · 2⁴⁰ + 5, which is newer than step 9 of generation 1:
/// ```
/// use evermoe::protocol::version_of;
/// assert_eq!(version_of(2, 5), 2_199_023_255_557);
/// assert!(version_of(2, 5) > version_of(1, 9));
/// ```
pub fn version_of(generation: u64, step: u64) -> u64 {
    generation << STEP_BITS | step
}

/// Returns the number of steps that the state of a version has taken.
pub fn step_of(version: u64) -> u64 {
    version & ((1 << STEP_BITS) - 1)
}

/// Returns the membership that made a version.
pub fn generation_of(version: u64) -> u64 {
    version >> STEP_BITS
}
