//! Objects under a URL: S3, GCS, Azure, and read-only HTTP. The only module that uses `object_store`.
//!
//! ```text
//! URL ─ Address ─ ObjectStore ─ put · create · read · list · remove ─ requests, retried with back-off
//! ```
//!
//! The only requirement on a store is a create-only write, which S3, GCS and Azure have. [`ObjectStore::create`] makes
//! an object unless its name is taken, and returns the correct outcome even if an answer is lost.

mod address;
mod credentials;
mod objects;
mod pace;
mod problem;
mod runtime;

pub use address::{Address, Scheme};
pub use objects::{ObjectStore, Options, PART_BYTES, Stored};
