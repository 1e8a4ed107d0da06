//! Plan of a recovery, from the survey to the transfers: a pure function of the gathered survey, the same on every
//! rank.
//!
//! ```text
//! holdings (unit, version, digest, kind) of every rank ─ target version ─ vote on digests ─ transfers
//! ```

mod holding;
mod plan;
mod usable;
mod vote;

pub use holding::{Conflict, Holding, Kind};
pub use plan::{Plan, Reason, Transfer, plan, plan_lagging, plan_on_nodes, plan_version};
pub use usable::{Knowledge, usable};
