//! Selection of experts to copy, the cost of a failure, and each rank's share of saving: pure functions, the same on
//! every rank.
//!
//! ```text
//! counts [layers, experts] of each step ─ TokenLedger ─ tokens at risk, checkpoints waited ─┐
//!      ┌─ copied, or lost in a recovery ◄── experts to copy ◄── sequential, load_aware, budget ◄┘
//!      └► portion of lost tokens (PLT) ─ Dynamic-K
//! bytes of modules ─ shard_modules ─ which rank saves which part; place_owners ─ which rank steps which module
//! ```
//!
//! A [`Selection`] lists, for each layer, the experts to copy, ascending.

mod budget;
mod json;
mod ledger;
mod load_aware;
mod owners;
mod sequential;
mod shard;
mod shares;
mod tokens;

pub use budget::budget;
pub use ledger::TokenLedger;
pub use load_aware::load_aware;
pub use owners::place_owners;
pub use sequential::sequential;
pub use shard::{ModuleShard, shard_modules};

/// For each layer the experts to copy, ascending and without duplicates.
pub type Selection = Vec<Vec<usize>>;
