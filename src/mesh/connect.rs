//! Connecting the members: each listens, publishes its address with a token, and connects to all lower ranks.

use super::call::Mesh;
use crate::ensure;
use crate::error::{Error, Result};
use crate::reachability::{listen, unpredictable};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

/// Size of the token and the rank by which a connection introduces itself.
const HELLO_BYTES: usize = 24;
/// Answer of the side that accepts.
const WELCOME: u8 = 1;
/// Maximum number of connections that have not introduced themselves; further ones are closed immediately.
const MAX_STRANGERS: usize = 4096;

/// A member that the others may connect to.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    address: SocketAddr,
    token: [u8; 16],
}

impl Listening {
    /// Listens on a free port of an address; None: of all addresses.
    ///
    /// # Errors
    /// [`Error::Io`] if the address is not this machine's, or the system has no free port.
    pub fn open(address: Option<IpAddr>) -> Result<Self> {
        let failed = |error| Error::io("opening a port for the collectives of other members", error);
        let (listener, address) = listen(address).map_err(failed)?;
        let mut token = [0; 16];
        token[..8].copy_from_slice(&unpredictable());
        token[8..].copy_from_slice(&unpredictable());
        Ok(Self { listener, address, token })
    }

    /// The port and the token that others need, as text.
    pub fn name(&self) -> String {
        format!("{}/{:032x}", self.address.port(), u128::from_le_bytes(self.token))
    }

    /// Connects all members, of which each calls this.
    ///
    /// # Arguments
    /// * `names`: `host:` and [`Self::name`] of each member, by rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank out of range or a name that is none. [`Error::Io`] if a member does not come or answer
    /// within the limit.
    pub fn connect(self, rank: usize, names: &[String], limit: Duration) -> Result<Mesh> {
        ensure!(rank < names.len(), "rank: expected one below the {} members, got {rank}", names.len());
        let end = Instant::now() + limit;
        let streams = thread::scope(|scope| {
            let accepting = scope.spawn(|| self.accept(rank, names.len(), end));
            let called = names[..rank].iter().map(|name| call(name, rank, end)).collect::<Result<Vec<_>>>();
            // The thread has its own time limit, and panics only with this one.
            let accepted = accepting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let mut streams: Vec<_> = called?.into_iter().map(Some).collect();
            streams.push(None);
            streams.extend(accepted?.into_iter().map(Some));
            Ok::<_, Error>(streams)
        })?;
        Mesh::new(rank, streams)
    }

    /// Accepts the connections of the members after this one, by rank. One that does not introduce itself is kept, and
    /// keeps nobody out: it may be anyone's.
    fn accept(&self, rank: usize, size: usize, end: Instant) -> Result<Vec<TcpStream>> {
        let failed = |error| Error::io("waiting for the connections of other members", error);
        let mut found: Vec<Option<TcpStream>> = (rank + 1..size).map(|_| None).collect();
        let mut strangers: Vec<Stranger> = Vec::new();
        self.listener.set_nonblocking(true).map_err(failed)?;
        while found.iter().any(Option::is_none) {
            self.wait(&strangers, end).map_err(failed)?;
            match self.listener.accept() {
                Ok((stream, _)) if strangers.len() < MAX_STRANGERS => strangers.extend(Stranger::new(stream)),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(error)),
            }
            for mut each in std::mem::take(&mut strangers) {
                match each.read() {
                    Ok(true) => {
                        let place = each.rank(self.token).and_then(|other| other.checked_sub(rank + 1));
                        if let Some(place) = place.and_then(|at| found.get_mut(at))
                            && each.stream.write_all(&[WELCOME]).is_ok()
                        {
                            *place = Some(each.stream);
                        }
                    }
                    Ok(false) => strangers.push(each),
                    Err(_) => {} // it is closed
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Waits for the next connection, or for the introduction of one.
    fn wait(&self, strangers: &[Stranger], end: Instant) -> std::io::Result<()> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let descriptors = strangers.iter().map(|each| each.stream.as_raw_fd());
        let mut polled: Vec<_> = std::iter::once(self.listener.as_raw_fd())
            .chain(descriptors)
            .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
            .collect();
        let milliseconds = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: `polled` is valid for its length, and the listener and `strangers` keep its descriptors open.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
        Ok(())
    }
}

/// A connection that has not introduced itself, and what it has said so far.
#[derive(Debug)]
struct Stranger {
    stream: TcpStream,
    said: Vec<u8>,
}

impl Stranger {
    fn new(stream: TcpStream) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        Some(Self { stream, said: Vec::new() })
    }

    /// Reads what has come; returns whether that is all.
    fn read(&mut self) -> std::io::Result<bool> {
        let mut more = [0; HELLO_BYTES];
        match self.stream.read(&mut more[self.said.len()..]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                let start = self.said.len();
                self.said.extend_from_slice(&more[start..start + n]);
                Ok(self.said.len() == HELLO_BYTES)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the rank of the member that it is, if it knows the token.
    fn rank(&self, token: [u8; 16]) -> Option<usize> {
        let rank: [u8; 8] = self.said.strip_prefix(&token)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(rank)).ok()
    }
}

/// Connects to a member, and introduces this one.
fn call(name: &str, rank: usize, end: Instant) -> Result<TcpStream> {
    let wrong = || Error::invalid(format!("names: expected \"host:port/token\", got {name:?}"));
    let (address, token) = name.split_once('/').ok_or_else(wrong)?;
    let token = u128::from_str_radix(token, 16).map_err(|_| wrong())?;
    let failed = |error| Error::io(format!("connecting to {address}"), error);
    let mut reason = ErrorKind::TimedOut.into();
    for each in address.to_socket_addrs().map_err(failed)? {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&each, left).and_then(|stream| greet(stream, token, rank, end)) {
            Ok(stream) => return Ok(stream),
            Err(error) => reason = error,
        }
    }
    Err(failed(reason))
}

fn greet(mut stream: TcpStream, token: u128, rank: usize, end: Instant) -> std::io::Result<TcpStream> {
    stream.write_all(&[&token.to_le_bytes()[..], &(rank as u64).to_le_bytes()].concat())?;
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    let mut answer = [0];
    // The system's word for the end of this timeout is "temporarily unavailable".
    stream.read_exact(&mut answer).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    })?;
    if answer == [WELCOME] { Ok(stream) } else { Err(ErrorKind::InvalidData.into()) }
}
