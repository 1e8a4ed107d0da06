//! Arenas: two versions of a set of units in a file of shared memory that outlives the process.
//!
//! ```text
//! one arena file    header │ descriptor │ buffer 0 │ buffer 1
//! one buffer        version, a digest per unit │ unit 0 │ unit 1 │ …            each aligned to 64 bytes
//!
//! empty ─ begin ─► writing ─ commit, or commit_received ─► complete ─ begin ─► writing …
//! ```
//!
//! A version becomes visible atomically, even if the process is killed between any two instructions: a buffer is marked
//! as being written before its first byte changes, and as complete after its last byte has. A [`CopyEngine`] fills
//! buffers in a background thread.

mod arena;
mod capture;
mod digests;
mod layout;
mod mapping;
mod state;

pub use arena::{Arena, PageLock};
pub use capture::{Capture, CaptureState, CopyEngine, Digests, Fetch, Run, copy_units};
pub use digests::{digest, digests};
pub use layout::{Layout, Unit};
