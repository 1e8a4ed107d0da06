//! Reachability of other members: each runs a probe server that answers the others.
//!
//! A probe server answers from its own thread, so a member that computes or holds the GIL still answers. A stopped
//! process, a host without power and a host behind a network partition do not answer. The host of a process that has
//! ended refuses the connection.

mod detector;
mod probe;
mod server;

pub use detector::{FailureDetector, Finding};
pub(crate) use probe::unpredictable;
pub use probe::{Answer, probe_all};
pub use server::ProbeServer;

use crate::secret::{Secret, TAG_BYTES};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// A nonce, drawn by the side that probes.
type Number = [u8; 8];

/// Answer of a member's probe server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The group for whose next step the member computes; 0 if it waits for others.
    pub computes: u64,
    /// The group in which the member's wait for a live member timed out; 0 for none.
    pub gave_up: u64,
}

/// Size of a report in bytes.
const REPORT_BYTES: usize = 16;

impl Report {
    fn to_bytes(self) -> [u8; REPORT_BYTES] {
        (u128::from(self.computes) | u128::from(self.gave_up) << 64).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; REPORT_BYTES]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self { computes: (both & u128::from(u64::MAX)) as u64, gave_up: (both >> 64) as u64 }
    }
}

/// Listens on a free port of one address, or of all addresses.
pub(crate) fn listen(address: Option<IpAddr>) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = match address {
        Some(address) => TcpListener::bind((address, 0)),
        // A dual-stack socket, or IPv4 alone where the system has no IPv6.
        None => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))),
    }?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Wakes the thread that listens on this address, so that it notices that it should end.
///
/// The thread waits for a connection. If this one fails, the thread ends at the next, which it refuses.
pub(crate) fn wake(address: SocketAddr) {
    let host = if address.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address.ip() };
    let own = SocketAddr::new(host, address.port());
    drop(TcpStream::connect_timeout(&own, Duration::from_millis(100)));
}

/// Proof that a report comes from the member and not from another process that was given the same port later.
///
/// With a secret, only members of the job can compute it.
fn proof(member: &str, number: Number, report: &[u8], secret: Option<&Secret>) -> Vec<u8> {
    match secret {
        Some(secret) => secret.tag("answer", &[member.as_bytes(), &number, report]).to_vec(),
        None => (xxh3_64(member.as_bytes()) ^ u64::from_le_bytes(number)).to_le_bytes().to_vec(),
    }
}

/// Sends a nonce to the server, with a tag that proves knowledge of the secret, if the job has one.
fn write_probe(
    stream: &mut impl Write,
    member: &str,
    number: Number,
    secret: Option<&Secret>,
) -> std::io::Result<()> {
    let mut probe = number.to_vec();
    if let Some(secret) = secret {
        probe.extend(secret.tag("probe", &[member.as_bytes(), &number]));
    }
    stream.write_all(&probe)
}

/// Size of a probe in bytes.
fn probe_bytes(secret: Option<&Secret>) -> usize {
    size_of::<Number>() + secret.map_or(0, |_| TAG_BYTES)
}

/// Reads a probe and returns its nonce.
fn read_probe(stream: &mut impl Read, member: &str, secret: Option<&Secret>) -> std::io::Result<Number> {
    let mut number = Number::default();
    stream.read_exact(&mut number)?;
    if let Some(secret) = secret {
        let mut tag = [0; TAG_BYTES];
        stream.read_exact(&mut tag)?;
        if !secret.is_tag(&tag, "probe", &[member.as_bytes(), &number]) {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                "the probe was not signed with this job's secret",
            ));
        }
    }
    Ok(number)
}
