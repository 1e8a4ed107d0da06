//! Versions on their way to the store, and those that must stay there: pure functions and transitions.
//!
//! ```text
//! complete snapshot ─ TripleBuffer ─ which slot is written, which is persisted, which is the recovery version
//! durable versions of each unit ─ retained ─ those that a recovery from the store would take
//! ```

mod retain;
mod triple;

pub use retain::retained;
pub use triple::{Event, Slot, TripleBuffer};
