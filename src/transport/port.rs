//! The port that receivers connect to.

use super::STACK_BYTES;
use super::lane::serve;
use super::table::Table;
use super::ucx::Ucx;
use super::wire::{Hello, Timed, welcome};
use crate::error::{Error, Result};
use crate::reachability::{listen, wake};
use crate::secret::Secret;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// Maximum number of connections for groups that this member has not joined yet; further ones are closed.
const MAX_EARLY: usize = 4096;
/// Maximum number of connections that have not introduced themselves; further ones are closed immediately.
const MAX_UNKNOWN: usize = 4096;
/// Time in which a connection must introduce itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// Transport of the bytes of long messages; the same on all members.
#[derive(Clone, Debug, Default)]
pub enum Carrier {
    /// The connections between members.
    #[default]
    Tcp,
    /// UCX: RDMA if the network supports it. Requires the feature `ucx`, and the library when a port is opened.
    Ucx {
        /// Names or paths of `libucp.so.0`; the first suitable one is used.
        libraries: Vec<String>,
    },
}

/// A port for the connections of a member's groups, one group after the other.
#[derive(Debug)]
pub struct Port {
    addresses: Vec<SocketAddr>,
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
    /// Connections of members that joined their next group earlier.
    early: Vec<(Hello, TcpStream)>,
}

impl Port {
    /// Opens a free port at each address, such as those of several network cards; at all addresses of this machine if
    /// none is given. With a secret, only members with that secret can connect.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no free port or thread, or an address is not one of this machine's;
    /// [`Error::Invalid`] if the carrier is not available.
    pub fn open(addresses: &[IpAddr], secret: Option<&Secret>, carrier: &Carrier) -> Result<Self> {
        let ucx = match carrier {
            Carrier::Tcp => None,
            Carrier::Ucx { libraries } => Some(Ucx::open(libraries)?),
        };
        let failed = |error| Error::io("opening a port for messages from other members", error);
        let given: Vec<_> = addresses.iter().copied().map(Some).collect();
        let given = if given.is_empty() { vec![None] } else { given };
        let listening: Vec<_> =
            given.into_iter().map(listen).collect::<std::io::Result<_>>().map_err(failed)?;
        let gate = Arc::new(Gate {
            secret: secret.cloned(),
            ucx,
            unknown: AtomicUsize::new(0),
            inside: Mutex::default(),
        });
        let (listeners, addresses): (Vec<_>, _) = listening.into_iter().unzip();
        let port = Self { addresses, gate };
        for listener in listeners {
            let inside = port.gate.clone();
            let accept = move || inside.admit_all(&listener);
            thread::Builder::new().name("evermoe-port".into()).spawn(accept).map_err(failed)?;
        }
        Ok(port)
    }

    /// Returns the port number at each of the given addresses, or the one at all addresses.
    pub fn ports(&self) -> Vec<u16> {
        self.addresses.iter().map(SocketAddr::port).collect()
    }

    /// Admits connections for a new group from now on, and no longer for the previous one.
    pub(super) fn admit_to(&self, table: &Arc<Table>) {
        let mut inside = self.gate.lock();
        inside.now = Some((table.group, Arc::downgrade(table)));
        let early = std::mem::take(&mut inside.early);
        drop(inside);
        for (hello, stream) in early.into_iter().filter(|(hello, _)| hello.group == table.group) {
            let table = table.clone();
            // A connection without a thread is closed; its member then counts as lost.
            let _served = thread::Builder::new()
                .stack_size(STACK_BYTES)
                .name("evermoe-serve".into())
                .spawn(move || serve(&table, hello, stream));
        }
    }

    /// The secret and the UCX library, which connections of this port need.
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
        for &address in &self.addresses {
            wake(address);
        }
    }
}

impl Gate {
    fn admit_all(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.lock().is_closed {
                return;
            }
            match stream {
                Ok(stream) => self.admit(stream),
                Err(_) => thread::sleep(Duration::from_millis(10)), // perhaps out of descriptors: others close meanwhile
            }
        }
    }

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
        // A connection without a thread is closed.
        if admitted.is_err() {
            self.unknown.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn talk(&self, stream: TcpStream) {
        let hello = Timed::talk(&stream, PATIENCE, |stream| {
            welcome(stream, self.ucx.is_some(), self.secret.as_ref())
        });
        self.unknown.fetch_sub(1, Ordering::SeqCst);
        // A connection that fails to introduce itself is closed: it may be anyone.
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
