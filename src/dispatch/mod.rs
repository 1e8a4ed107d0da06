//! Split of tokens among the ranks that hold their experts: pure functions of the gathered counts, the same on every rank.
//!
//! Every rank knows all counts (one all-gather) and the replica matrix, so every rank computes the same whole table
//! of every expert and reads its own row (what it sends) and column (what it receives) from it: no second exchange.
//!
//! [`split_tokens`] is the face; [`split_expert`] is the arithmetic of one expert; [`imbalance`] says how even the work
//! is, and [`LoadAverage`] how much of it there has been lately.

mod balanced;
mod expert;
mod flow;
mod imbalance;
mod load;
mod split;

pub use expert::{Route, split_expert};
pub(crate) use imbalance::check_load;
pub use imbalance::imbalance;
pub use load::LoadAverage;
pub use split::{Split, split_tokens};

/// Policy by which the ranks that hold an expert share its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Equal numbers for all replicas.
    Even,
    /// Whatever makes the busiest rank compute the fewest.
    Balanced,
}
