//! What a preset does to a step: which copies exist, which are made, their versions, their bytes and their memory.
//!
//! ```text
//! units, ranks, preset ─ Engine::plan ─ Planned: first copies, bytes that do not fit, pace
//! step begins ── begin_step ── experts whose copies follow the step          (moetion: Algorithm 1)
//! step taken ─── take_step ─── StepCopies: bytes to peers, units to save     (pec: Dynamic-K)
//! save ends ──── end_save                       recovery ── freeze, lose     (which copies are left, lost tokens)
//! any time ───── Copies: version of each unit, Copies::host_bytes: memory of each node
//! ```
//!
//! Sessions, pipelines, the simulator, `evermoe plan` and the forecast of memory read these rules; none of them has rules of
//! its own. The engine reads no clock: executors report what is complete.

mod copies;
mod driver;
mod memory;
mod schedule;
mod selector;
mod traffic;
mod turns;
mod units;

pub use copies::{Copies, History, UnitCopies};
pub use driver::{Engine, Members, Options, Planned};
pub use memory::{log_bytes, unit_memory};
pub use schedule::VersionSchedule;
pub use selector::{Budgets, Selector};
pub use traffic::{Network, Pace, Sends, busiest};
pub use turns::StepCopies;
pub use units::Units;
