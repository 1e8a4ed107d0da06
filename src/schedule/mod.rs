//! Schedule of copying: spans of a profile → idle windows → which chunk goes in which window; all pure.
//!
//! ```text
//! steps of spans ─ find_windows ─ Windows ─┬─ plan_chunks(policy) ─ ChunkPlan ─ chrome_trace ─ merge_traces
//! units, link, memory ─────────────────────┘        ▲
//! recent steps ─ has_changed ─ Change ──────────────┘ plan again
//! ```
//!
//! Times are in seconds, sizes in bytes, rates in bytes per second.

mod auto;
mod baft;
mod capacity;
mod change;
mod forecast;
mod knapsack;
mod memory;
mod pace;
mod period;
mod plan;
mod request;
mod span;
mod stream;
mod trace;
mod windows;

pub use change::{Change, has_changed};
pub use forecast::{forecast_memory, synthetic_windows};
pub use knapsack::{Item, best_subset};
pub use memory::{MemoryKind, snapshot_memory};
pub use period::{Period, copy_period};
pub use plan::{Chunk, ChunkPlan, Reason, plan_chunks, version_steps};
pub(crate) use request::MAX_STEPS;
pub use request::{CopyItem, Link, Memory, Policy, Receiver, Request};
pub use span::{Kind, Resource, Span, StepProfile};
pub use trace::{Sent, chrome_trace, merge_traces};
pub use windows::{Anchor, Evidence, Window, WindowOptions, Windows, find_windows};
