//! Protection of each unit: kind and nodes of its copies, by the cost model of the `auto` policy; pure, the same on
//! every rank.
//!
//! ```text
//! unit ─ choices(holders, kind) ─ cost and expected loss ─ hull ─┐
//! node ─ windows, memory ─ capacity ─────────────────────────────┴─ choose ─ CopyPlan
//! PresetName ─ Preset: planners, and other differences between presets
//! preset, units, ranks ─ plan_protection (`auto` by that plan) ─ copies of each unit in a session
//! ```

mod capacity;
mod choose;
mod copy_constants;
mod improve;
mod options;
mod plan;
mod preset;
mod request;
mod session_plan;
mod summary;

pub use choose::choose_copies;
pub use copy_constants::{
    BATCH_BYTES, BATCH_STEPS, FAILURE, LOG_STEPS, LOGGED_STEPS, MAX_PERIOD, OWN_VERSIONS, RECORD_BYTES,
    batch_steps,
};
pub use plan::{CopyKind, CopyPlan, CopyReason, Holder, Limit, LossSurvival, NodeUse, UnitChoice};
pub use preset::{
    Copying, Lagging, Levels, PRESETS, Preset, PresetName, Selecting, copy_budget, levels, unmeasured_budget,
};
pub use request::{CopyNode, CopyRequest, CopyUnit};
pub use session_plan::{
    DEFAULT_LINK, ProtectionPlan, ProtectionRequest, RankInfo, UnitInfo, UnitProtection, plan_protection,
};
