//! The side that answers.

use super::{Said, listen, proof, read_knock, wake};
use crate::error::{Error, Result};
use crate::secret::Secret;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
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
    address: SocketAddr,
    keeper: Arc<Keeper>,
}

/// What the threads of a door know.
#[derive(Debug)]
struct Keeper {
    member: String,
    /// That of the member's job.
    secret: Option<Secret>,
    is_closed: AtomicBool,
    computes: AtomicU64,
    gave_up: AtomicU64,
}

impl Door {
    /// A door of the member with this id, on a free port of an address, or of all. With a secret it answers those alone
    /// that have it.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no port or no thread, or the address is not this machine's.
    pub fn open(member: &str, address: Option<IpAddr>, secret: Option<&Secret>) -> Result<Self> {
        let failed = |error| Error::io("opening a port that answers other members", error);
        let (listener, address) = listen(address).map_err(failed)?;
        let keeper = Arc::new(Keeper {
            member: member.to_owned(),
            secret: secret.cloned(),
            is_closed: AtomicBool::new(false),
            computes: AtomicU64::new(0),
            gave_up: AtomicU64::new(0),
        });
        let inside = keeper.clone();
        thread::Builder::new()
            .name("evermoe-door".into())
            .spawn(move || serve(&listener, &inside))
            .map_err(failed)?;
        Ok(Self { address, keeper })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Says the group for whose next step the member computes; 0 for none.
    pub fn set_computes(&self, group: u64) {
        self.keeper.computes.store(group, Ordering::SeqCst);
    }

    /// Says the group in which the member has waited in vain; 0 for none.
    pub fn set_gave_up(&self, group: u64) {
        self.keeper.gave_up.store(group, Ordering::SeqCst);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.keeper.is_closed.store(true, Ordering::SeqCst);
        wake(self.address);
    }
}

fn serve(listener: &TcpListener, keeper: &Arc<Keeper>) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if keeper.is_closed.load(Ordering::SeqCst) {
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
        let (keeper, done) = (keeper.clone(), open.clone());
        let answering = thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            // An error ends the connection, and nothing else.
            let _ended = talk(stream, &keeper);
            done.fetch_sub(1, Ordering::SeqCst);
        });
        if answering.is_err() {
            open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn talk(mut stream: TcpStream, keeper: &Keeper) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    loop {
        let (member, secret) = (&keeper.member, keeper.secret.as_ref());
        let number = read_knock(&mut stream, member, secret)?;
        if keeper.is_closed.load(Ordering::SeqCst) {
            return Ok(()); // who asks learns so, as no other connection is answered
        }
        let said = Said {
            computes: keeper.computes.load(Ordering::SeqCst),
            gave_up: keeper.gave_up.load(Ordering::SeqCst),
        };
        let mut answer = said.to_bytes().to_vec();
        answer.extend(proof(member, number, &said.to_bytes(), secret));
        stream.write_all(&answer)?;
    }
}
