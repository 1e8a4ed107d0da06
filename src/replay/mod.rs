//! Records of a trainer's steps, and the log in which a replica keeps them until it repeats the steps. Pure.
//!
//! ```text
//! trainer   gradient, numbers of the step ─ encode ─► record ─ … any transport … ─┐
//! replica   state ◄─ repeat the steps (cpu, cuda) ◄─ take ─ log ◄─ accept ◄───────┘   a fault asks for the full state
//! ```
//!
//! A flipped bit is detected before it is used: in transit by the record's checksum; in the log by that of the entry,
//! which [`Log::take`] and [`Batch::is_intact`] compare; in the state by its digest, which the replica keeps. A proof
//! is a record with the trainer's own digest after a step, which the state of a replica that repeated the steps is
//! compared with.
//!
//! | file | what |
//! |---|---|
//! | `record` | one step, or one full state, as bytes; faults of records |
//! | `bytes` | numbers as their bytes |
//! | `gradient` | lossless encoding of gradients in the fewest bytes |
//! | `checksum` | XXH3-64 of a payload, computed while it is copied, and of a state |
//! | `frame` | the records that one member sends to another in a step |
//! | `entry` | one logged step, protected against changes in memory |
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
