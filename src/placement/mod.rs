//! Placement: replicas of each expert, their nodes, and the holders of copies. Pure functions, the same on every rank.
//!
//! ```text
//! load ─ allocate, reallocate ─ replicas ─ place ─ matrix [nodes, experts]
//! nodes ─ copy_holders, training_copy_holders ─ holders of a rank's copies
//! holders ─ primaries ─ the rank that makes a unit's copies
//! both ─ unit_copy_holders ─ holders of a unit's copies
//! old and new matrix ─ migrate ─ the node of each row, and the transfers
//! matrix or holders ─ survival ─ probability that nothing is lost when some nodes fail at once
//! ```

mod adjust;
mod allocate;
mod assign;
mod candidate;
mod cells;
mod choose;
mod classic;
mod climb;
mod domains;
mod holders;
mod improve;
mod layout;
mod migrate;
mod moving;
mod place;
mod reallocate;
mod respread;
mod result;
mod rows;
mod survival;
mod training_holders;
mod unit_holders;

pub use allocate::allocate;
pub use holders::{CopyPolicy, copy_holders, primaries};
pub use migrate::{ExpertTransfer, Migration, migrate};
pub use moving::{is_worth_moving, keep_in_place, ranks_in_place, session_slots};
pub use place::{Policy, Request, place};
pub use reallocate::reallocate;
pub use result::{Construction, Placement, Reason};
pub(crate) use rows::{Rows, matrix_of, rows_of};
#[cfg(feature = "python")]
pub(crate) use survival::{Draws, copy_recovery_until, recovery_until};
pub use survival::{Survival, copy_recovery_probability, recovery_probability, survival};
pub use training_holders::{TrainingHolders, training_copy_holders};
pub use unit_holders::unit_copy_holders;
