//! Messages between members outside the collectives: from memory to memory over TCP, in threads of their own.
//!
//! The receiver connects to the sender, by several connections, and requests each message for which it has memory. A
//! message is sent once it is both requested and ready, on the connection of its request. So no message waits behind
//! one that nobody has memory for, and none is copied on its way; not even into the kernel, if that can send memory
//! directly.
//!
//! ```text
//! receiver                                     sender
//!    │ connect, hello(group, rank) ───────────►  │ Port
//!    │ request(tag, number, room) ────────────►  │
//!    │  ◄──────────── header(tag, number, length)│ once it is ready
//!    │  ◄──────────────────────────────── bytes  │
//! ```
//!
//! Messages with one tag between two members are numbered and keep their order. The end of a connection means that the
//! member is lost: transfers between the two fail, transfers between others do not.
//!
//! With [`Carrier::Ucx`] the bytes of long messages are sent outside the connection, by [UCX](https://openucx.org): see
//! `ucx/`.

mod item;
mod lane;
mod links;
mod port;
mod table;
mod transfer;
#[cfg_attr(not(feature = "ucx"), path = "no_ucx.rs")]
mod ucx;
mod wire;
mod zero_copy;

pub use links::{Links, Peers};
pub use port::{Carrier, Port};
pub use transfer::Transfer;

/// Stack size of a thread that sends or receives.
const STACK_BYTES: usize = 128 << 10;
/// Stack size of a thread that runs UCX.
const UCX_STACK_BYTES: usize = 1 << 20;
