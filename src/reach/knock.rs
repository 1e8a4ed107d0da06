//! The side that asks.

use super::{Number, SAID_BYTES, Said, proof, write_knock};
use crate::secret::Secret;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What became of a question to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It answers.
    Said(Said),
    /// Its host refuses the connection, as it does where the process has ended.
    Ended,
    /// No answer of the member's has come.
    Nothing,
}

/// What members answer within `limit`, all asked at once.
///
/// A member is its id and the address of its door, `host:port`. Names are looked up within the limit, too. With a secret
/// both sides must have it.
///
/// ```
/// use evermoe::reach::{Answer, Door, Said, ask_all};
/// use std::time::Duration;
/// let door = Door::open("a", None, None)?;
/// let address = format!("127.0.0.1:{}", door.port());
/// let members = [("a".to_owned(), address.clone()), ("b".to_owned(), address)]; // that port is not b's
/// let limit = Duration::from_secs(5);
/// assert_eq!(ask_all(&members, limit, None), [Answer::Said(Said::default()), Answer::Nothing]);
/// # Ok::<(), evermoe::Error>(())
/// ```
pub fn ask_all(members: &[(String, String)], limit: Duration, secret: Option<&Secret>) -> Vec<Answer> {
    let deadline = Instant::now() + limit;
    let (report, reports) = mpsc::channel();
    for (index, (member, address)) in members.iter().cloned().enumerate() {
        let (report, secret) = (report.clone(), secret.cloned());
        // A thread that cannot be started reports nothing, as one whose member does not answer. One that looks up a
        // name for longer than the limit is left behind: it ends by itself.
        let _started = thread::Builder::new().name("evermoe-knock".into()).spawn(move || {
            let said = Visit::begin(&address, deadline)
                .and_then(|mut visit| visit.knock(&member, deadline, secret.as_ref()));
            let answer = match said {
                Ok(said) => Answer::Said(said),
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Answer::Ended,
                Err(_) => return,
            };
            // All answers may be in already that somebody waits for.
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

/// A connection to a door.
pub(super) struct Visit(TcpStream);

impl Visit {
    /// Connects to `host:port`.
    pub(super) fn begin(address: &str, deadline: Instant) -> std::io::Result<Self> {
        let mut why = Error::new(ErrorKind::NotFound, "the name has no address");
        for (number, socket) in address.to_socket_addrs()?.enumerate() {
            match left(deadline).and_then(|limit| TcpStream::connect_timeout(&socket, limit)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Self(stream));
                }
                // A process has ended if all its addresses refuse the connection: it may listen on one of them alone.
                Err(error) if number == 0 || error.kind() != ErrorKind::ConnectionRefused => why = error,
                Err(_) => {}
            }
        }
        Err(why)
    }

    /// What the member answers.
    pub(super) fn knock(
        &mut self,
        member: &str,
        deadline: Instant,
        secret: Option<&Secret>,
    ) -> std::io::Result<Said> {
        let stream = &mut self.0;
        stream.set_read_timeout(Some(left(deadline)?))?;
        stream.set_write_timeout(Some(left(deadline)?))?;
        let number = unforeseen();
        write_knock(stream, member, number, secret)?;
        let mut said = [0; SAID_BYTES];
        stream.read_exact(&mut said)?;
        let expected = proof(member, number, &said, secret);
        let mut found = vec![0; expected.len()];
        stream.read_exact(&mut found)?;
        if found == expected {
            Ok(Said::from_bytes(said))
        } else {
            Err(Error::new(ErrorKind::InvalidData, "another process has that port"))
        }
    }
}

impl Visit {
    /// Waits until the member closes the connection, as the system does for a process that ends, or so long.
    pub(super) fn wait_closed(&self, limit: Duration) {
        // An error is that of a connection that is gone, or of a limit that is over: the next question tells which.
        let _silent = self.0.set_read_timeout(Some(limit)).and_then(|()| self.0.peek(&mut [0]));
    }

    /// The connection, for another thread to end a wait.
    pub(super) fn connection(&self) -> Option<TcpStream> {
        self.0.try_clone().ok()
    }
}

/// A number that nobody has seen: the keys of maps are drawn from the system's random numbers.
pub(crate) fn unforeseen() -> Number {
    RandomState::new().hash_one(Instant::now()).to_le_bytes()
}

/// Time until the deadline: never zero, which would mean for ever.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
