//! The side that asks.

use super::{answer, read, write};
use std::io::{Error, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Which members answer within `limit`, all asked at once.
///
/// A member is its id and the address of its door, `host:port`. Names are looked up within the limit, too.
///
/// ```
/// use evermoe::reach::{Door, reachable};
/// use std::time::Duration;
/// let door = Door::open("a", None)?;
/// let address = format!("127.0.0.1:{}", door.port());
/// let members = [("a".to_owned(), address.clone()), ("b".to_owned(), address)]; // that port is not b's
/// assert_eq!(reachable(&members, Duration::from_secs(5)), [true, false]);
/// # Ok::<(), evermoe::error::Error>(())
/// ```
pub fn reachable(members: &[(String, String)], limit: Duration) -> Vec<bool> {
    let deadline = Instant::now() + limit;
    let (report, reports) = mpsc::channel();
    for (index, (member, address)) in members.iter().cloned().enumerate() {
        let report = report.clone();
        // A thread that cannot be started reports nothing, as one whose member does not answer. One that looks up a
        // name for longer than the limit is left behind: it ends by itself.
        let _started = thread::Builder::new().name("evermoe-knock".into()).spawn(move || {
            if ask(&member, &address, deadline).is_ok() {
                // All answers may be in already that somebody waits for.
                let _heard = report.send(index);
            }
        });
    }
    drop(report);
    let mut found = vec![false; members.len()];
    while let Ok(index) = reports.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        found[index] = true;
    }
    found
}

fn ask(member: &str, address: &str, deadline: Instant) -> std::io::Result<()> {
    let mut result = Err(Error::new(ErrorKind::NotFound, "the name has no address"));
    for socket in address.to_socket_addrs()? {
        result = left(deadline)
            .and_then(|limit| TcpStream::connect_timeout(&socket, limit))
            .and_then(|stream| knock(stream, member, deadline));
        if result.is_ok() {
            break;
        }
    }
    result
}

fn knock(mut stream: TcpStream, member: &str, deadline: Instant) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(left(deadline)?))?;
    stream.set_write_timeout(Some(left(deadline)?))?;
    let knock = u64::from(stream.local_addr()?.port()) << 48 | u64::from(std::process::id());
    write(&mut stream, knock)?;
    if read(&mut stream)? == answer(member, knock) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::InvalidData, "another process has that port"))
    }
}

/// Time until the deadline: never zero, which would mean for ever.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
