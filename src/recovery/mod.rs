//! From what survives to what is fetched from whom: a pure function of the gathered survey, the same on every rank.
//!
//! ```text
//! holdings (unit, version, digest, kind) of every rank ─ target version ─ vote on digests ─ transfers
//! ```

mod plan;
mod retain;
mod vote;

pub use plan::{Conflict, Holding, Kind, Plan, Reason, Transfer, plan, plan_lagging};
pub use retain::retained;
