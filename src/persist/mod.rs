//! Persisted versions: the triple buffer, retention, and manifests. Pure functions and transitions.
//!
//! ```text
//! complete snapshot ─ TripleBuffer ─ which slot is written, which is persisted, which is the recovery version
//! durable versions of each unit ─ retained ─ those that a recovery from the store would take
//! what is saved together ─ Manifest ─ JSON with a checksum, read by a strict schema
//! ```

mod manifest;
mod retain;
mod triple;

pub use manifest::{MANIFEST_FORMAT, Manifest, PARTS_FORMAT, SHARING_FORMAT, SavedUnit};
pub use retain::retained;
pub use triple::{Event, Slot, TripleBuffer};
