//! What a preset does to a step: which copies exist, which are made, their versions, their bytes and their memory.
//!
//! ```text
//! units, ranks, preset ─ Engine::plan ─ Planned: first copies, bytes that do not fit
//! step begins ── begin_step ── experts whose copies follow the step          (moetion: Algorithm 1)
//! step taken ─── take_step ─── StepCopies: bytes to peers, units to save     (pec: Dynamic-K)
//! save ends ──── end_save                       recovery ── restore, lose    (which copies are left, lost tokens)
//! any time ───── if_lost: the version that is left, tokens that experts lose; Copies::host_bytes: memory of each node
//! ```
//!
//! The simulator drives an [`Engine`]. Sessions and pipelines take their selections from [`Selector`] and the schedule of versions
//! from [`VersionSchedule`], and keep the rest themselves. The engine reads no clock: executors report what is complete.

mod copies;
mod core;
mod in_turn;
mod loss;
mod memory;
mod options;
mod selector;
mod traffic;
mod units;
mod version_schedule;

pub use self::core::{Engine, Members, Planned};
pub use copies::{Copies, History, UnitCopies};
pub use in_turn::{LOAD_HALF_LIFE, StepCopies};
pub use loss::Loss;
pub use options::Options;
pub use selector::{Budgets, Selector};
pub use traffic::{MAX_VERSION_STEPS, Network, Pace, Sends, busiest};
pub use units::Units;
pub use version_schedule::VersionSchedule;
