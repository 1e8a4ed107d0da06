//! Whether other members can be reached: each has a door, which answers what it is sent.
//!
//! A door answers from a thread of its own, so that a member that computes, or holds Python's lock, is reached. A
//! process that is stopped does not answer, nor does a host without power, nor one behind a cut; the host of a process
//! that has ended refuses the connection.

mod door;
mod knock;
mod watch;

pub use door::Door;
pub(crate) use knock::unforeseen;
pub use knock::{Answer, ask_all};
pub use watch::{Seen, Watch};

use crate::secret::{Secret, TAG_BYTES};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// A number that is used once, by the side that asks.
type Number = [u8; 8];

/// What a member's door says about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The group for whose next step it computes; 0 for none: it waits for others.
    pub computes: u64,
    /// The group in which it has waited in vain for a member that lives; 0 for none.
    pub gave_up: u64,
}

/// Bytes of what a door says.
const SAID_BYTES: usize = 16;

impl Said {
    fn to_bytes(self) -> [u8; SAID_BYTES] {
        (u128::from(self.computes) | u128::from(self.gave_up) << 64).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; SAID_BYTES]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self { computes: (both & u128::from(u64::MAX)) as u64, gave_up: (both >> 64) as u64 }
    }
}

/// Listens on a free port of an address, or of all.
pub(crate) fn listen(address: Option<IpAddr>) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = match address {
        Some(address) => TcpListener::bind((address, 0)),
        // IPv4, too, unless the system has no IPv6
        None => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))),
    }?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Has the thread that listens there look whether it is to end. It waits for a connection; without this one it stays until
/// the next comes, which is refused.
pub(crate) fn wake(address: SocketAddr) {
    let host = if address.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address.ip() };
    let own = SocketAddr::new(host, address.port());
    drop(TcpStream::connect_timeout(&own, Duration::from_millis(100)));
}

/// The proof that what a door says comes from the member: other processes that come to have its port answer otherwise.
/// With a secret only a member of the job can give it.
fn proof(member: &str, number: Number, said: &[u8], secret: Option<&Secret>) -> Vec<u8> {
    match secret {
        Some(secret) => secret.tag("answer", &[member.as_bytes(), &number, said]).to_vec(),
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

/// Bytes of a knock.
fn knock_bytes(secret: Option<&Secret>) -> usize {
    size_of::<Number>() + secret.map_or(0, |_| TAG_BYTES)
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
