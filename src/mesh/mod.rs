//! Collectives and messages among members on the CPU: a TCP connection between any two, served by the calling thread.
//!
//! Each member sends its part to every other one at once, and reads theirs as they come. So a collective waits for one
//! message of each member, and not for a ring of neighbours or for another thread.
//!
//! Each message has a header of 16 bytes: its tag, the number of the collective, and its length. A message that nobody
//! awaits yet is kept. Where the scripts of members differ, so that they meet in different collectives, the headers show it.
//!
//! Any thread can close the connections, which ends all waits on both sides.

mod bytes;
mod call;
mod connect;
mod inbox;

pub use bytes::Bytes;
pub use call::Mesh;
pub use connect::Listening;

/// Bit of the tags that are those of collectives, in which all members take part in the same order.
pub const COLLECTIVE: u32 = 1 << 31;
/// Size of a header.
const HEADER_BYTES: usize = 16;

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    tag: u32,
    /// Number of a collective since the members were connected; 0 for other messages.
    number: u32,
    length: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let word = u128::from(self.tag) | u128::from(self.number) << 32 | u128::from(self.length) << 64;
        word.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let word = u128::from_le_bytes(bytes);
        let low = |at: u32| (word >> at & u128::from(u32::MAX)) as u32;
        Self { tag: low(0), number: low(32), length: (word >> 64) as u64 }
    }

    fn is_collective(self) -> bool {
        self.tag & COLLECTIVE != 0
    }
}
