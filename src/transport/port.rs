//! Where members that receive connect to.

use super::STACK_BYTES;
use super::lane::serve;
use super::table::Table;
use super::ucx::Ucx;
use super::wire::{Hello, Timed, welcome};
use crate::error::{Error, Result};
use crate::reach::{listen, wake};
use crate::secret::Secret;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Connections for groups that this member is not in yet; more are closed.
const MAX_EARLY: usize = 4096;
/// Connections that may say whose they are at a time; more are closed at once.
const MAX_UNKNOWN: usize = 4096;
/// How long a connection may take to say whose it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// What carries the bytes of long messages: the same on all members.
#[derive(Clone, Debug, Default)]
pub enum Carrier {
    /// The connections between members.
    #[default]
    Tcp,
    /// UCX: RDMA where the network has it. Needs the feature `ucx`, and the library when a port is opened.
    Ucx {
        /// Names or paths of `libucp.so.0`, of which the first is taken that is there and new enough.
        libraries: Vec<String>,
    },
}

/// A port for the connections of all groups of a member, one after the other.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    gate: Arc<Gate>,
}

#[derive(Debug)]
struct Gate {
    secret: Option<Secret>,
    ucx: Option<&'static Ucx>,
    unknown: AtomicUsize,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    is_closed: bool,
    now: Option<(u64, Weak<Table>)>,
    /// Connections of members that were quicker to begin their next group.
    early: Vec<(Hello, TcpStream)>,
}

impl Port {
    /// A free port of an address, or of all. With a secret it lets those alone connect that have it.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no port or no thread, or the address is not this machine's;
    /// [`Error::Invalid`] when there is no such carrier here.
    pub fn open(address: Option<IpAddr>, secret: Option<&Secret>, carrier: &Carrier) -> Result<Self> {
        let ucx = match carrier {
            Carrier::Tcp => None,
            Carrier::Ucx { libraries } => Some(Ucx::open(libraries)?),
        };
        let failed = |error| Error::io("opening a port for messages of other members", error);
        let (listener, address) = listen(address).map_err(failed)?;
        let gate = Arc::new(Gate {
            secret: secret.cloned(),
            ucx,
            unknown: AtomicUsize::new(0),
            inside: Mutex::default(),
        });
        let inside = gate.clone();
        let accept = move || {
            for stream in listener.incoming() {
                if inside.lock().is_closed {
                    return;
                }
                match stream {
                    Ok(stream) => inside.admit(stream),
                    Err(_) => thread::sleep(Duration::from_millis(10)), // out of descriptors, perhaps: others end
                }
            }
        };
        thread::Builder::new().name("evermoe-port".into()).spawn(accept).map_err(failed)?;
        Ok(Self { address, gate })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Takes connections for a new group from now on, and no longer those for the one before.
    pub(super) fn admit_to(&self, table: &Arc<Table>) {
        let mut inside = self.gate.lock();
        inside.now = Some((table.group, Arc::downgrade(table)));
        let early = std::mem::take(&mut inside.early);
        drop(inside);
        for (hello, stream) in early.into_iter().filter(|(hello, _)| hello.group == table.group) {
            let table = table.clone();
            // One without a thread is closed, as one whose member is lost.
            let _served = thread::Builder::new()
                .stack_size(STACK_BYTES)
                .name("evermoe-serve".into())
                .spawn(move || serve(&table, hello, stream));
        }
    }

    /// What connections of this port need: the secret, and UCX.
    pub(super) fn ways(&self) -> (Option<Secret>, Option<&'static Ucx>) {
        (self.gate.secret.clone(), self.gate.ucx)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut inside = self.gate.lock();
        (inside.is_closed, inside.now) = (true, None);
        inside.early.clear();
        drop(inside);
        wake(self.address);
    }
}

impl Gate {
    fn admit(self: &Arc<Self>, stream: TcpStream) {
        let gate = self.clone();
        if self.unknown.fetch_add(1, Ordering::SeqCst) >= MAX_UNKNOWN {
            self.unknown.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let admitted = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .name("evermoe-serve".into())
            .spawn(move || gate.talk(stream));
        // One without a thread is closed.
        if admitted.is_err() {
            self.unknown.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn talk(&self, stream: TcpStream) {
        let hello = Timed::talk(&stream, PATIENCE, |stream| {
            welcome(stream, self.ucx.is_some(), self.secret.as_ref())
        });
        self.unknown.fetch_sub(1, Ordering::SeqCst);
        // Whoever fails to introduce itself is closed: it may be anybody.
        let Ok(hello) = hello else { return };
        let mut inside = self.lock();
        if inside.is_closed {
            return;
        }
        match &inside.now {
            Some((group, table)) if *group == hello.group => {
                let table = table.upgrade();
                drop(inside);
                if let Some(table) = table {
                    serve(&table, hello, stream);
                }
            }
            _ if inside.early.len() < MAX_EARLY => inside.early.push((hello, stream)),
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
