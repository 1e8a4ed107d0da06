//! Messages between members beside their collectives: from memory to memory over TCP, in threads of their own.
//!
//! Who receives connects to who sends, by some connections at a time, and asks for each message that it has room for. A
//! message travels once it is asked for and there, on the connection that it was asked for on: so none waits behind one
//! that nobody has room for, and none is copied on its way: into the kernel neither, where it sends memory itself.
//!
//! ```text
//! receiver                                     sender
//!    │ connect, hello(group, rank) ───────────►  │ Port
//!    │ request(tag, number, room) ────────────►  │
//!    │  ◄──────────── header(tag, number, length)│ once it is there
//!    │  ◄──────────────────────────────── bytes  │
//! ```
//!
//! Messages of one tag between two members are numbered, and keep their order. A connection that ends is a member that is
//! lost: what was on its way between the two fails, what is on its way between others does not.
//!
//! With [`Carrier::Ucx`] the bytes of long messages go beside the connection, by [UCX](https://openucx.org): see `ucx/`.

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

/// Stack of a thread that sends or receives.
const STACK_BYTES: usize = 128 << 10;
/// Stack of one in which UCX works.
const UCX_STACK_BYTES: usize = 1 << 20;
