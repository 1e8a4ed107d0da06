//! Protection of each unit: kind and nodes of its copies, by the cost model of the `auto` policy; pure, the same on
//! every rank.
//!
//! ```text
//! unit ─ choices(holders, kind) ─ cost and expected loss ─ hull ─┐
//! node ─ windows, memory ─ capacity ─────────────────────────────┴─ choose ─ CopyPlan
//! preset, units, ranks ─ arrange (of `auto` by that plan) ─ who keeps copies of what in a session
//! ```

mod arrange;
mod capacity;
mod choose;
mod improve;
mod options;
mod plan;
mod request;
mod summary;

pub use arrange::{
    Arrangement, Copying, DEFAULT_LINK, FAILURE, Kept, LOG_STEPS, LOGGED_STEPS, OWN_VERSIONS, RECORD_BYTES,
    SessionRank, SessionRequest, SessionUnit, arrange,
};
pub use choose::choose_copies;
pub use plan::{CopyKind, CopyPlan, CopyReason, Holder, Limit, LossSurvival, NodeUse, UnitChoice};
pub use request::{CopyNode, CopyRequest, CopyUnit};
