//! Records of a trainer's steps, and the log in which a replica keeps them until it repeats the steps. Pure.
//!
//! ```text
//! trainer   gradient, numbers of the step ─ encode ─► record ─ … any transport … ─┐
//! replica   state ◄─ repeat the steps (cpu, cuda) ◄─ take ─ log ◄─ accept ◄───────┘   a fault asks for the full state
//! ```
//!
//! A flipped bit is found before it is used: on the way by the record's checksum; in the log by that of the entry, which
//! [`Log::take`] and [`Batch::is_intact`] compare; in the state by its digest, which the replica keeps. A record that is a
//! proof has the trainer's own digest after a step: what steps made of the state elsewhere is compared with that.
//!
//! | file | what |
//! |---|---|
//! | `record` | one step, or one full state, as bytes; what can be wrong with them |
//! | `bytes` | numbers as their bytes |
//! | `gradient` | a gradient in the fewest bytes that give back its bits |
//! | `checksum` | XXH3-64 of a payload, made while it is copied, and of a state |
//! | `frame` | what one member sends another in a step: many records in one piece of memory |
//! | `entry` | one logged step, and whether its bytes are those that came |
//! | `log` | accepted records, in order, in bounded memory; batches of them |

mod bytes;
mod checksum;
mod entry;
mod frame;
mod gradient;
mod log;
mod record;

pub use checksum::state_digest;
pub use frame::{Draft, FRAME_HEAD_BYTES, Outgoing, fill_frame};
pub use gradient::{BLOCK, Encoded, Encoding, encode_gradient, most_payload_bytes};
pub use log::{Accepted, Batch, Log, Stored};
pub use record::{Fault, HEADER_BYTES, Header, Kind, PROOF_BYTES, Record, Rule, ignores_sign_of_zero};
