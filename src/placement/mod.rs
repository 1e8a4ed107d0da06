//! How many replicas of each expert, on which ranks, and who keeps the copies: pure functions, the same on every rank.
//!
//! ```text
//! load ─ allocate ─ replicas ─ place ─ matrix [ranks, experts]
//! nodes ─ copy_holders, training_copy_holders ─ who keeps copies of a rank
//! holders ─ primaries ─ who makes the copies of a unit
//! both ─ unit_copy_holders ─ who keeps the copies of a unit
//! any of them ─ survival ─ how likely nothing is lost when some nodes fail at once
//! ```

mod allocate;
mod copies;
mod domains;
mod flow;
mod place;
mod survival;
mod training_copies;
mod unit_copies;

pub use allocate::allocate;
pub use copies::{CopyPolicy, copy_holders, primaries};
pub use place::place;
pub use survival::{Survival, copy_recovery_probability, recovery_probability, survival};
pub use training_copies::{TrainingCopies, training_copy_holders};
pub use unit_copies::unit_copy_holders;
