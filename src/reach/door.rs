//! The side that answers.

use super::{Said, answer, read, write};
use crate::error::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Connections that are answered at a time; more are closed at once.
const MOST_CONNECTIONS: usize = 4096;
/// How long a connection may be silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// Stack of a thread that answers.
const STACK_BYTES: usize = 64 << 10;

/// A port that answers for one member, until it is dropped.
#[derive(Debug)]
pub struct Door {
    port: u16,
    sign: Arc<Sign>,
}

/// What the threads of a door know.
#[derive(Debug, Default)]
struct Sign {
    is_closed: AtomicBool,
    computes: AtomicU64,
    gave_up: AtomicU64,
}

impl Door {
    /// A door of the member with this id, on a free port of all interfaces.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no port or no thread.
    pub fn open(member: &str) -> Result<Self> {
        let failed = |error| Error::io("opening a port that answers other members", error);
        let both = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)); // IPv4, too, unless the system has no IPv6
        let listener = both.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let sign = Arc::new(Sign::default());
        let (shown, member): (_, Arc<str>) = (sign.clone(), member.into());
        thread::Builder::new()
            .name("evermoe-door".into())
            .spawn(move || serve(&listener, &member, &shown))
            .map_err(failed)?;
        Ok(Self { port, sign })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Says the group for whose next step the member computes; 0 for none.
    pub fn set_computes(&self, group: u64) {
        self.sign.computes.store(group, Ordering::SeqCst);
    }

    /// Says the group in which the member has waited in vain; 0 for none.
    pub fn set_gave_up(&self, group: u64) {
        self.sign.gave_up.store(group, Ordering::SeqCst);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.sign.is_closed.store(true, Ordering::SeqCst);
        // Its thread waits for a connection; without one it stays until the next comes, which is refused.
        let own = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), self.port);
        drop(TcpStream::connect_timeout(&own, Duration::from_millis(100)));
    }
}

fn serve(listener: &TcpListener, member: &Arc<str>, sign: &Arc<Sign>) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if sign.is_closed.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else {
            thread::sleep(Duration::from_millis(10)); // out of descriptors, perhaps: others end meanwhile
            continue;
        };
        if open.fetch_add(1, Ordering::SeqCst) >= MOST_CONNECTIONS {
            open.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let (member, done, sign) = (member.clone(), open.clone(), sign.clone());
        let answering = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            // An error ends the connection, and nothing else.
            let _ended = talk(stream, &member, &sign);
            done.fetch_sub(1, Ordering::SeqCst);
        });
        if answering.is_err() {
            open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn talk(mut stream: TcpStream, member: &str, sign: &Sign) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    loop {
        let [knock] = read(&mut stream)?;
        let said = Said {
            computes: sign.computes.load(Ordering::SeqCst),
            gave_up: sign.gave_up.load(Ordering::SeqCst),
        };
        write(&mut stream, &[answer(member, knock), said.computes, said.gave_up])?;
    }
}
