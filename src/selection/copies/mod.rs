//! How each unit is kept safe: the one cost model of the `auto` policy.
//!
//! ```text
//! unit ─ choices(holders, kind) ─ cost and expected loss ─ hull ─┐
//! node ─ windows, memory ─ room ─────────────────────────────────┴─ choose ─ CopyPlan
//! ```

mod choose;
mod improve;
mod options;
mod plan;
mod request;
mod room;
mod summary;

pub use choose::choose_copies;
pub use plan::{CopyKind, CopyPlan, CopyReason, Holder, Limit, LossSurvival, NodeUse, UnitChoice};
pub use request::{CopyNode, CopyRequest, CopyUnit};
