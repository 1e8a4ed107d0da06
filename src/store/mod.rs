//! Objects under a URL: S3, GCS, Azure, and HTTP for reading. The one place that knows `object_store`.
//!
//! ```text
//! URL ─ Address ─ Place ─ put · create · read · list · remove ─ requests, retried with back-off
//! ```
//!
//! All that is asked of a place is a create-only write, which S3, GCS and Azure have: [`Place::create`] makes an object
//! unless its name is taken, and is right about which of the two it was also where an answer got lost.

mod address;
mod credentials;
mod pace;
mod place;
mod problem;
mod runtime;

pub use address::{Address, Scheme};
pub use place::{Options, PART_BYTES, Place, Stored};
