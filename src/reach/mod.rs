//! Whether other members can be reached: each has a door, which answers what it is sent.
//!
//! A door answers from a thread of its own, so that a member that computes, or holds Python's lock, is reached. A
//! process that is stopped does not answer, nor does a host without power, nor one behind a cut.

mod door;
mod knock;

pub use door::Door;
pub use knock::reachable;

use crate::secret::{Secret, TAG_BYTES};
use std::io::{Error, ErrorKind, Read, Write};
use xxhash_rust::xxh3::xxh3_64;

/// A number that is used once, by the side that asks.
type Number = [u8; 8];

/// The answer of a member's door to a knock: other processes that come to have its port answer otherwise. With a secret
/// only a member of the job can give it.
fn answer(member: &str, number: Number, secret: Option<&Secret>) -> Vec<u8> {
    match secret {
        Some(secret) => secret.tag("answer", &[member.as_bytes(), &number]).to_vec(),
        None => (xxh3_64(member.as_bytes()) ^ u64::from_le_bytes(number)).to_le_bytes().to_vec(),
    }
}

/// Sends a number to the door, and with a secret the proof that the side that asks has it.
fn write_knock(
    stream: &mut impl Write,
    member: &str,
    number: Number,
    secret: Option<&Secret>,
) -> std::io::Result<()> {
    let mut knock = number.to_vec();
    if let Some(secret) = secret {
        knock.extend(secret.tag("knock", &[member.as_bytes(), &number]));
    }
    stream.write_all(&knock)
}

/// The number of a knock.
fn read_knock(stream: &mut impl Read, member: &str, secret: Option<&Secret>) -> std::io::Result<Number> {
    let mut number = Number::default();
    stream.read_exact(&mut number)?;
    if let Some(secret) = secret {
        let mut tag = [0; TAG_BYTES];
        stream.read_exact(&mut tag)?;
        if !secret.is_tag(&tag, "knock", &[member.as_bytes(), &number]) {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                "the side that asks does not have the job's secret",
            ));
        }
    }
    Ok(number)
}
