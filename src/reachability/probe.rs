//! The client side: probes members.

use super::{Number, REPORT_BYTES, Report, proof, write_probe};
use crate::secret::Secret;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Result of probing a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The member answered.
    Report(Report),
    /// Its host refused the connection, as it does when the process has ended.
    Ended,
    /// No answer of this member arrived.
    Nothing,
}

/// Probes all members at once and returns their answers, each received within `limit`.
///
/// A member is given by its id and the address of its probe server, `host:port`. The limit includes name resolution. If
/// there is a secret, both sides must have it.
///
/// ```
/// use evermoe::reachability::{Answer, ProbeServer, Report, probe_all};
/// use std::time::Duration;
/// let server = ProbeServer::open("a", None, None)?;
/// let address = format!("127.0.0.1:{}", server.port());
/// let members = [("a".to_owned(), address.clone()), ("b".to_owned(), address)]; // that port is not b's
/// let limit = Duration::from_secs(5);
/// assert_eq!(probe_all(&members, limit, None), [Answer::Report(Report::default()), Answer::Nothing]);
/// # Ok::<(), evermoe::Error>(())
/// ```
pub fn probe_all(members: &[(String, String)], limit: Duration, secret: Option<&Secret>) -> Vec<Answer> {
    let deadline = Instant::now() + limit;
    let (report, reports) = mpsc::channel();
    for (index, (member, address)) in members.iter().cloned().enumerate() {
        let (report, secret) = (report.clone(), secret.cloned());
        // A thread that cannot be started counts as a member that does not answer. A thread whose name resolution exceeds
        // the limit is abandoned and ends by itself.
        let _started = thread::Builder::new().name("evermoe-probe".into()).spawn(move || {
            let result = Probe::begin(&address, deadline)
                .and_then(|mut probe| probe.ask(&member, deadline, secret.as_ref()));
            let answer = match result {
                Ok(report) => Answer::Report(report),
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Answer::Ended,
                Err(_) => return,
            };
            // The receiver may have returned already.
            let _heard = report.send((index, answer));
        });
    }
    drop(report);
    let mut found = vec![Answer::Nothing; members.len()];
    while let Ok((index, answer)) = reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        found[index] = answer;
    }
    found
}

/// A connection to a probe server.
pub(super) struct Probe(TcpStream);

impl Probe {
    /// Connects to `host:port`.
    pub(super) fn begin(address: &str, deadline: Instant) -> std::io::Result<Self> {
        let mut why = Error::new(ErrorKind::NotFound, "the host name resolves to no address");
        for (number, socket) in address.to_socket_addrs()?.enumerate() {
            match left(deadline).and_then(|limit| TcpStream::connect_timeout(&socket, limit)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Self(stream));
                }
                // A process may listen on one of its host's addresses only: it has ended if all of them refuse.
                Err(error) if number == 0 || error.kind() != ErrorKind::ConnectionRefused => why = error,
                Err(_) => {}
            }
        }
        Err(why)
    }

    /// Sends one probe and returns the member's report.
    pub(super) fn ask(
        &mut self,
        member: &str,
        deadline: Instant,
        secret: Option<&Secret>,
    ) -> std::io::Result<Report> {
        let stream = &mut self.0;
        stream.set_read_timeout(Some(left(deadline)?))?;
        stream.set_write_timeout(Some(left(deadline)?))?;
        let number = unpredictable();
        write_probe(stream, member, number, secret)?;
        let mut report = [0; REPORT_BYTES];
        stream.read_exact(&mut report)?;
        let expected = proof(member, number, &report, secret);
        let mut found = vec![0; expected.len()];
        stream.read_exact(&mut found)?;
        if found == expected {
            Ok(Report::from_bytes(report))
        } else {
            Err(Error::new(ErrorKind::InvalidData, "another process listens on that port"))
        }
    }
}

impl Probe {
    /// Waits until the connection is closed, as the kernel does when the member's process ends, or until the limit.
    pub(super) fn wait_closed(&self, limit: Duration) {
        // An error means a closed connection or an expired limit; the next probe finds out which.
        let _silent = self.0.set_read_timeout(Some(limit)).and_then(|()| self.0.peek(&mut [0]));
    }

    /// Returns the connection, by which another thread can end a wait.
    pub(super) fn connection(&self) -> Option<TcpStream> {
        self.0.try_clone().ok()
    }
}

/// Returns an unpredictable number: the keys of hash maps come from the system's random source.
pub(crate) fn unpredictable() -> Number {
    RandomState::new().hash_one(Instant::now()).to_le_bytes()
}

/// Time until the deadline; never zero, which a socket would take for no timeout.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
