//! Files that are on disk when the call returns: written around the page cache where the file system allows it, by
//! several threads.
//!
//! ```text
//! header, tensors ─ Content ─┬ thread: take the next block ─ copy it to an aligned buffer ─ write ─┐
//!                            ├ thread: …                                                           ├─ sync ─ done
//!                            └ …                                                                   ┘
//! ```
//!
//! A plain write fills the page cache first, and a sync then waits for all of it: an extra copy, and a single queue.

mod content;
mod safetensors;
mod writer;

pub use content::Content;
pub use safetensors::{Piece, header};
pub use writer::{write, write_hashed};
