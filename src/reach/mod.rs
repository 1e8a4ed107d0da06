//! Whether other members can be reached: each has a door, which answers what it is sent.
//!
//! A door answers from a thread of its own, so that a member that computes, or holds Python's lock, is reached. A
//! process that is stopped does not answer, nor does a host without power, nor one behind a cut.

mod door;
mod knock;
mod watch;

pub use door::Door;
pub use knock::reachable;
pub use watch::Watch;

use std::io::{Read, Write};
use xxhash_rust::xxh3::xxh3_64;

/// The answer of a member's door to a knock: other processes that come to have its port answer otherwise.
fn answer(member: &str, knock: u64) -> u64 {
    xxh3_64(member.as_bytes()) ^ knock
}

fn read(stream: &mut impl Read) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn write(stream: &mut impl Write, number: u64) -> std::io::Result<()> {
    stream.write_all(&number.to_le_bytes())
}
