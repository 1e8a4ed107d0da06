//! Records of a trainer's steps, and the log in which a replica keeps them until it repeats the steps. Pure.
//!
//! ```text
//! trainer   gradient, numbers of the step ─ encode ─► record ─ … any transport … ─┐
//! replica   state ◄─ repeat the steps (cpu, cuda) ◄─ take ─ log ◄─ accept ◄───────┘   a fault asks for the full state
//! ```
//!
//! | file | what |
//! |---|---|
//! | `record` | one step, or one full state, as bytes; what can be wrong with them |
//! | `gradient` | a gradient in the fewest bytes that give back its bits |
//! | `checksum` | XXH3-64 of a payload, made while it is copied |
//! | `log` | accepted records, in order, in bounded memory; batches of them |

mod checksum;
mod gradient;
mod log;
mod record;

pub use gradient::{BLOCK, Encoded, Encoding, encode_gradient, most_payload_bytes};
pub use log::{Accepted, Batch, Log, Stored};
pub use record::{Fault, HEADER_BYTES, Header, Kind, Record, Rule, ignores_sign_of_zero};
