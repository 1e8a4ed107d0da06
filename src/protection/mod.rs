//! Protection of each unit: kind and nodes of its copies, by the cost model of the `auto` policy; pure, the same on
//! every rank.
//!
//! ```text
//! unit ─ choices(holders, kind) ─ cost and expected loss ─ hull ─┐
//! node ─ windows, memory ─ capacity ─────────────────────────────┴─ choose ─ CopyPlan
//! preset, units, ranks ─ plan_protection (`auto` by that plan) ─ copies of each unit in a session
//! ```

mod capacity;
mod choose;
mod improve;
mod options;
mod plan;
mod request;
mod session_plan;
mod summary;

pub use choose::choose_copies;
pub use plan::{CopyKind, CopyPlan, CopyReason, Holder, Limit, LossSurvival, NodeUse, UnitChoice};
pub use request::{CopyNode, CopyRequest, CopyUnit};
pub use session_plan::{
    Copying, DEFAULT_LINK, FAILURE, LOG_STEPS, LOGGED_STEPS, OWN_VERSIONS, ProtectionPlan, ProtectionRequest,
    RECORD_BYTES, RankInfo, UnitInfo, UnitProtection, plan_protection,
};
