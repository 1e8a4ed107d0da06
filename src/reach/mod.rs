//! Whether other members can be reached: each has a door, which answers what it is sent.
//!
//! A door answers from a thread of its own, so that a member that computes, or holds Python's lock, is reached. A
//! process that is stopped does not answer, nor does a host without power, nor one behind a cut.

mod door;
mod knock;
mod watch;

pub use door::Door;
pub use knock::ask_all;
pub use watch::{Seen, Watch};

use std::io::{Read, Write};
use xxhash_rust::xxh3::xxh3_64;

/// What a member's door says about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The group for whose next step it computes; 0 for none: it waits for others.
    pub computes: u64,
    /// The group in which it has waited in vain for a member that lives; 0 for none.
    pub gave_up: u64,
}

/// The answer of a member's door to a knock: other processes that come to have its port answer otherwise.
fn answer(member: &str, knock: u64) -> u64 {
    xxh3_64(member.as_bytes()) ^ knock
}

fn read<const N: usize>(stream: &mut impl Read) -> std::io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

fn write(stream: &mut impl Write, numbers: &[u64]) -> std::io::Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    stream.write_all(&bytes)
}
