//! Split of tokens among the ranks that hold their experts: pure functions of the gathered counts, the same on every rank.
//!
//! Every rank knows all counts (one all-gather) and the replica matrix. So every rank computes the same complete table
//! of every expert and reads its own row (tokens to send) and column (tokens to receive) from it, without a second
//! exchange.
//!
//! [`split_tokens`] is the entry point; [`split_expert`] is the arithmetic of one expert; [`imbalance`] measures how
//! even the work is, and [`LoadAverage`] averages the recent load.

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

use crate::error::{Error, Result};
use std::str::FromStr;

/// Policy by which the ranks that hold an expert share its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Equal numbers for all replicas.
    Even,
    /// The split that minimises the tokens of the busiest rank.
    Balanced,
}

impl Policy {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["even", "balanced"][self as usize]
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = [Self::Even, Self::Balanced].into_iter().find(|policy| policy.name() == name);
        known.ok_or_else(|| Error::invalid(format!("policy: expected even or balanced, got {name:?}")))
    }
}
