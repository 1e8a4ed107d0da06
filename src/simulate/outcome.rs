//! Result of a simulation.

use super::account::{Cause, Spent, seconds};
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum number of events that an outcome records.
pub(super) const MAX_HAPPENED: usize = 1 << 12;

/// An event of the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Happened {
    /// Nanoseconds from the start.
    pub at: u64,
    /// `lost`, `resumed`, or `restarted`.
    pub what: &'static str,
    /// Number of steps that the state had taken.
    pub step: u64,
    /// Members before a loss, or after a recovery.
    pub members: usize,
}

/// Counts while a simulation runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) steps: u64,
    pub(super) undone_steps: u64,
    pub(super) interrupted_steps: u64,
    pub(super) recoveries: u64,
    pub(super) moves: u64,
    pub(super) restarts: u64,
    pub(super) checkpoint_loads: u64,
    pub(super) lost_tokens: f64,
    pub(super) copy_bytes: u128,
    pub(super) first_bytes: u128,
    pub(super) recovery_bytes: u128,
    pub(super) local_bytes: u128,
    pub(super) store_bytes: u128,
    pub(super) read_bytes: u128,
    pub(super) memory_bytes: u64,
    pub(super) missing_copy_bytes: u64,
    /// None before the first recovery.
    pub(super) fewest_members: Option<usize>,
    pub(super) recovery_nanoseconds: Vec<u64>,
    pub(super) happened: Vec<Happened>,
}

/// Result of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the scheme.
    pub scheme: String,
    /// Simulated seconds.
    pub seconds: f64,
    /// Nanoseconds by cause; they add up to `seconds`.
    pub nanoseconds: BTreeMap<&'static str, u64>,
    /// Effective training time ratio (ETTR): share of the time in which steps that count were computed.
    pub ettr: f64,
    /// Tokens of these steps per second, without those that experts lost.
    pub goodput_tokens_per_second: f64,
    /// The same, relative to training on all nodes of the cluster without failures and copies, with an even load.
    pub goodput: f64,
    /// Steps that count.
    pub steps: u64,
    /// Steps that were undone and taken again.
    pub undone_steps: u64,
    /// Steps that a loss interrupted.
    pub interrupted_steps: u64,
    /// Tokens of steps that were undone or interrupted.
    pub repeated_tokens: f64,
    /// Tokens that experts lost as they returned to older versions alone.
    pub lost_tokens: f64,
    /// Portion of lost tokens (PLT), averaged over layers.
    pub plt: f64,
    /// Members that were lost.
    pub losses: u64,
    /// Recoveries, including the start and those for newcomers.
    pub recoveries: u64,
    /// Number of times that experts moved because the load had shifted.
    pub moves: u64,
    /// Number of times that all processes were restarted.
    pub restarts: u64,
    /// Number of times that all members returned to a checkpoint.
    pub checkpoint_loads: u64,
    /// Bytes of copies to peers.
    pub copy_bytes: u128,
    /// Bytes of first copies after changes.
    pub first_bytes: u128,
    /// Bytes that recoveries fetched from peers.
    pub recovery_bytes: u128,
    /// Bytes that recoveries took from copies in own memory.
    pub local_bytes: u128,
    /// Bytes that were written to the store.
    pub store_bytes: u128,
    /// Bytes that were read from the store.
    pub read_bytes: u128,
    /// Memory for state and copies on the fullest node.
    pub memory_bytes: u64,
    /// Bytes of planned copies that did not fit into the nodes' host memory, under the plan that lacks the most; 0 if
    /// all fitted.
    pub missing_copy_bytes: u64,
    /// Mean number of training nodes.
    pub mean_members: f64,
    /// Minimum number of training nodes.
    pub fewest_members: usize,
    /// Seconds from each loss until training resumed.
    pub recovery_seconds: Vec<f64>,
    /// The first events, up to a limit.
    pub happened: Vec<Happened>,
}

/// Inputs of an outcome.
pub(super) struct OutcomeInputs<'a> {
    pub(super) scheme: &'a str,
    pub(super) tokens_per_step: u64,
    pub(super) ideal_step_seconds: f64,
    pub(super) tally: Tally,
    pub(super) spent: &'a Spent,
    pub(super) now: u64,
    pub(super) member_time: u128,
    pub(super) losses: u64,
    pub(super) plt: Option<f64>,
}

impl Tally {
    /// Counts members that train from now on.
    pub(super) fn note_members(&mut self, members: usize) {
        self.fewest_members = Some(self.fewest_members.map_or(members, |fewest| fewest.min(members)));
    }
}

impl Outcome {
    pub(super) fn new(parts: OutcomeInputs<'_>) -> Self {
        let OutcomeInputs { tally, spent, tokens_per_step, .. } = parts;
        let (total, tokens) = (seconds(parts.now).max(f64::MIN_POSITIVE), tokens_per_step as f64);
        let kept = (tally.steps as f64 * tokens - tally.lost_tokens).max(0.0);
        let goodput = kept / total;
        let seen = (tally.steps as f64 * tokens).max(1.0);
        Self {
            scheme: parts.scheme.to_owned(),
            seconds: total,
            nanoseconds: Cause::ALL.iter().map(|&cause| (cause.name(), spent.of(cause))).collect(),
            ettr: seconds(spent.of(Cause::Train)) / total,
            goodput_tokens_per_second: goodput,
            goodput: goodput * parts.ideal_step_seconds / tokens,
            steps: tally.steps,
            undone_steps: tally.undone_steps,
            interrupted_steps: tally.interrupted_steps,
            repeated_tokens: (tally.undone_steps + tally.interrupted_steps) as f64 * tokens,
            lost_tokens: tally.lost_tokens,
            plt: parts.plt.unwrap_or((tally.lost_tokens / seen).min(1.0)),
            losses: parts.losses,
            recoveries: tally.recoveries,
            moves: tally.moves,
            restarts: tally.restarts,
            checkpoint_loads: tally.checkpoint_loads,
            copy_bytes: tally.copy_bytes,
            first_bytes: tally.first_bytes,
            recovery_bytes: tally.recovery_bytes,
            local_bytes: tally.local_bytes,
            store_bytes: tally.store_bytes,
            read_bytes: tally.read_bytes,
            memory_bytes: tally.memory_bytes,
            missing_copy_bytes: tally.missing_copy_bytes,
            mean_members: parts.member_time as f64 / (parts.now.max(1) as f64),
            fewest_members: tally.fewest_members.unwrap_or(0),
            recovery_seconds: tally.recovery_nanoseconds.into_iter().map(seconds).collect(),
            happened: tally.happened,
        }
    }
}
