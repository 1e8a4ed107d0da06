//! The side that asks.

use super::{Said, answer, read, write};
use std::io::{Error, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What members answer within `limit`, all asked at once; none for those that do not.
///
/// A member is its id and the address of its door, `host:port`. Names are looked up within the limit, too.
///
/// ```
/// use evermoe::reach::{Door, Said, ask_all};
/// use std::time::Duration;
/// let door = Door::open("a")?;
/// let address = format!("127.0.0.1:{}", door.port());
/// let members = [("a".to_owned(), address.clone()), ("b".to_owned(), address)]; // that port is not b's
/// assert_eq!(ask_all(&members, Duration::from_secs(5)), [Some(Said::default()), None]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
pub fn ask_all(members: &[(String, String)], limit: Duration) -> Vec<Option<Said>> {
    let deadline = Instant::now() + limit;
    let (report, reports) = mpsc::channel();
    for (index, (member, address)) in members.iter().cloned().enumerate() {
        let report = report.clone();
        // A thread that cannot be started reports nothing, as one whose member does not answer. One that looks up a
        // name for longer than the limit is left behind: it ends by itself.
        let _started = thread::Builder::new().name("evermoe-knock".into()).spawn(move || {
            if let Ok(said) = ask(&member, &address, deadline) {
                // All answers may be in already that somebody waits for.
                let _heard = report.send((index, said));
            }
        });
    }
    drop(report);
    let mut found = vec![None; members.len()];
    while let Ok((index, said)) = reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        found[index] = Some(said);
    }
    found
}

fn ask(member: &str, address: &str, deadline: Instant) -> std::io::Result<Said> {
    Visit::begin(address, deadline)?.knock(member, deadline)
}

/// A connection to a door.
pub(super) struct Visit(TcpStream);

impl Visit {
    /// Connects to `host:port`.
    pub(super) fn begin(address: &str, deadline: Instant) -> std::io::Result<Self> {
        let mut result = Err(Error::new(ErrorKind::NotFound, "the name has no address"));
        for socket in address.to_socket_addrs()? {
            result = left(deadline).and_then(|limit| TcpStream::connect_timeout(&socket, limit));
            if result.is_ok() {
                break;
            }
        }
        let stream = result?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    /// Returns once the member has answered.
    pub(super) fn knock(&mut self, member: &str, deadline: Instant) -> std::io::Result<Said> {
        let stream = &mut self.0;
        stream.set_read_timeout(Some(left(deadline)?))?;
        stream.set_write_timeout(Some(left(deadline)?))?;
        let knock = u64::from(stream.local_addr()?.port()) << 48 | u64::from(std::process::id());
        write(stream, &[knock])?;
        let [own, computes, gave_up] = read(stream)?;
        if own == answer(member, knock) {
            Ok(Said { computes, gave_up })
        } else {
            Err(Error::new(ErrorKind::InvalidData, "another process has that port"))
        }
    }
}

/// Time until the deadline: never zero, which would mean for ever.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
