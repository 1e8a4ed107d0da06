//! Simulated time, by what it is spent on. Whole nanoseconds: the causes add up to the total exactly.

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Steps that count.
    Train,
    /// Steps that were interrupted, or undone and taken again.
    Repeat,
    /// Steps that take longer because of copies.
    Copy,
    /// Steps that take longer because a node is slow.
    Straggle,
    /// Until a loss is known.
    Detect,
    /// Until all agree who goes on.
    Agree,
    /// Until they are connected.
    Rebuild,
    /// Until all know what survives.
    Survey,
    /// State from peers, own memory or the store.
    Fetch,
    /// Digests of what was fetched.
    Verify,
    /// First copies that training waits for.
    Protect,
    /// Checkpoints that training waits for.
    Checkpoint,
    /// Processes that start.
    Start,
    /// Too few nodes, or units that nobody has.
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

    /// Time that was thought to count does not.
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

/// Nanoseconds, rounded; at most half of what fits.
pub(super) fn nanoseconds(seconds: f64) -> u64 {
    const MOST: f64 = (u64::MAX / 2) as f64;
    (seconds * 1e9).round().clamp(0.0, MOST) as u64
}

/// Seconds of so many nanoseconds.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 * 1e-9
}
