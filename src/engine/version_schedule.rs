//! Schedule of the versions of copies, and the vote that waits for each.

/// Schedule of versions that are copied while training continues.
///
/// A version is copied over a number of steps, and must be complete before the vote on the last of them. The next version
/// begins when that vote has passed, so the previous one stays until then:
///
/// ```text
/// steps taken  0    1    2    3    4    5    6    7
/// copied       v0   v1 ─────────── v4 ─────────── v7     over 3 steps from version 1 on
/// complete          v0             v1             v4     with the votes that make 1, 4 and 7 the steps taken
/// ```
///
/// A loss just before the vote that makes 7 the steps taken rolls back to version 1, by 2 · 3 − 1 steps.
///
/// ```
/// use evermoe::engine::VersionSchedule;
/// let mut schedule = VersionSchedule::new(0);
/// let mut complete = Vec::new();
/// for step in 1..=7 {
///     if schedule.is_due(step) {
///         schedule.begin_version(step, 3);
///     }
///     complete.push(schedule.complete());
/// }
/// assert_eq!(complete, [0, 0, 0, 1, 1, 1, 4]);
/// assert_eq!(schedule.lag(7), 2); // 4 is complete with the vote on 7, two steps ago
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VersionSchedule {
    complete: u64,
    begun: u64,
    due: u64,
}

impl VersionSchedule {
    /// A schedule that begins with the state after `step` steps, whose copies are complete with the next vote.
    pub fn new(step: u64) -> Self {
        Self { complete: step, begun: step, due: step + 1 }
    }

    /// Steps taken in the newest version that is copied.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Steps taken in the newest version whose copies are complete.
    pub fn complete(&self) -> u64 {
        self.complete
    }

    /// Whether the vote on `step` needs the version in progress, after which the next one begins.
    pub fn is_due(&self, step: u64) -> bool {
        step >= self.due
    }

    /// Begins the version after `step` steps, over `steps` steps; the one in progress is complete on all members.
    pub fn begin_version(&mut self, step: u64, steps: u64) {
        *self = Self { complete: self.begun, begun: step, due: step + steps };
    }

    /// Steps by which complete versions lag behind at the vote that makes `step` the steps taken.
    pub fn lag(&self, step: u64) -> u64 {
        step.saturating_sub(1).saturating_sub(if self.is_due(step) { self.begun } else { self.complete })
    }
}
