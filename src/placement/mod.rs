//! How many replicas of each expert, on which nodes, and who keeps the copies: pure functions, the same on every rank.
//!
//! ```text
//! load ─ allocate ─ replicas ─ place ─ matrix [nodes, experts]
//! nodes ─ copy_holders, training_copy_holders ─ who keeps copies of a rank
//! holders ─ primaries ─ who makes the copies of a unit
//! both ─ unit_copy_holders ─ who keeps the copies of a unit
//! old and new matrix ─ migrate ─ which node takes which row, and who fetches what
//! any of them ─ survival ─ how likely nothing is lost when some nodes fail at once
//! ```

mod allocate;
mod assign;
mod cells;
mod choose;
mod classic;
mod copies;
mod domains;
mod improve;
mod layout;
mod migrate;
mod place;
mod respread;
mod survival;
mod training_copies;
mod unit_copies;

pub use allocate::allocate;
pub use copies::{CopyPolicy, copy_holders, primaries};
pub use migrate::{ExpertTransfer, Migration, migrate};
pub use place::{Construction, Placement, Policy, Reason, Request, place};
pub use survival::{Survival, copy_recovery_probability, recovery_probability, survival};
pub use training_copies::{TrainingCopies, training_copy_holders};
pub use unit_copies::unit_copy_holders;
