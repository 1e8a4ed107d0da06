//! Account of simulated time by cause. In integer nanoseconds, so that the causes add up to the total exactly.

/// Cause of spent time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Steps that count.
    Train,
    /// Steps that were interrupted, or undone and taken again.
    Repeat,
    /// Extra step time caused by copies.
    Copy,
    /// Extra step time caused by a slow node.
    Straggle,
    /// Time until a loss is known.
    Detect,
    /// Time until all agree on the members that continue.
    Agree,
    /// Time until these members are connected.
    Rebuild,
    /// Time until all know the surviving state.
    Survey,
    /// Transfer of state from peers, own memory or the store.
    Fetch,
    /// Digests of fetched state.
    Verify,
    /// First copies for which training waits.
    Protect,
    /// Checkpoints for which training waits.
    Checkpoint,
    /// Start of processes.
    Start,
    /// Wait for nodes, or for holders of missing units.
    Wait,
}

impl Cause {
    /// All causes, in order.
    pub(super) const ALL: [Self; 14] = [
        Self::Train,
        Self::Repeat,
        Self::Copy,
        Self::Straggle,
        Self::Detect,
        Self::Agree,
        Self::Rebuild,
        Self::Survey,
        Self::Fetch,
        Self::Verify,
        Self::Protect,
        Self::Checkpoint,
        Self::Start,
        Self::Wait,
    ];

    /// The name in Python.
    pub(super) fn name(self) -> &'static str {
        const NAMES: [&str; 14] = [
            "train",
            "repeat",
            "copy",
            "straggle",
            "detect",
            "agree",
            "rebuild",
            "survey",
            "fetch",
            "verify",
            "protect",
            "checkpoint",
            "start",
            "wait",
        ];
        NAMES[self as usize]
    }
}

/// Nanoseconds by cause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spent([u64; Cause::ALL.len()]);

impl Spent {
    pub(super) fn add(&mut self, cause: Cause, nanoseconds: u64) {
        self.0[cause as usize] += nanoseconds;
    }

    /// Moves time that was counted as training to `Repeat`.
    pub(super) fn move_to_repeat(&mut self, nanoseconds: u64) {
        let moved = nanoseconds.min(self.0[Cause::Train as usize]);
        self.0[Cause::Train as usize] -= moved;
        self.0[Cause::Repeat as usize] += moved;
    }

    /// Nanoseconds of a cause.
    pub(super) fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }
}

/// Converts to nanoseconds, rounded, at most half of the range.
pub(super) fn nanoseconds(seconds: f64) -> u64 {
    const MOST: f64 = (u64::MAX / 2) as f64;
    (seconds * 1e9).round().clamp(0.0, MOST) as u64
}

/// Converts nanoseconds to seconds.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}
