//! The server side: answers probes.

use super::{Report, listen, probe_bytes, proof, read_probe, wake};
use crate::error::{Error, Result};
use crate::secret::Secret;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of open connections; further ones are closed immediately.
const MAX_CONNECTIONS: usize = 4096;
/// Time after which a silent connection is closed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause after the system refused to accept a connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Connections that are accepted before open ones are served again.
const ACCEPTS: usize = 128;
/// Descriptors of the standard streams.
const STREAMS: libc::c_uint = 3;
/// Bytes that are read from a connection at a time.
const READ_BYTES: usize = 64;

/// A port that answers probes of one member until it is dropped.
#[derive(Debug)]
pub struct ProbeServer {
    address: SocketAddr,
    responder: Arc<Responder>,
}

/// State that the server shares with its thread.
#[derive(Debug)]
struct Responder {
    member: String,
    /// Secret of the member's job.
    secret: Option<Secret>,
    is_closed: AtomicBool,
    computes: AtomicU64,
    gave_up: AtomicU64,
}

impl ProbeServer {
    /// Opens a server for the member with this id, on a free port of one address or of all addresses.
    ///
    /// With a secret, it answers only clients that have the secret.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no free port or thread, or the address is not one of this machine's.
    pub fn open(member: &str, address: Option<IpAddr>, secret: Option<&Secret>) -> Result<Self> {
        let failed = |error| Error::io("opening a port for probes of other members", error);
        let (listener, address) = listen(address).map_err(failed)?;
        let responder = Arc::new(Responder {
            member: member.to_owned(),
            secret: secret.cloned(),
            is_closed: AtomicBool::new(false),
            computes: AtomicU64::new(0),
            gave_up: AtomicU64::new(0),
        });
        let (inside, shared) = (responder.clone(), listener.as_raw_fd());
        let (report, is_alone) = mpsc::channel();
        thread::Builder::new()
            .name("evermoe-probe-server".into())
            .spawn(move || {
                block_signals();
                // `open` waits for this.
                let _heard = report.send(keep_alone(&listener));
                serve(&listener, &inside);
            })
            .map_err(failed)?;
        if is_alone.recv().unwrap_or(false) {
            // SAFETY: the descriptor belonged to the listener, which the thread owns and closes in its own table. Nothing
            // else closes it in this table.
            unsafe { libc::close(shared) };
        }
        Ok(Self { address, responder })
    }

    /// Returns the port that the server listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Sets the group for whose next step the member computes; 0 for none.
    pub fn set_computes(&self, group: u64) {
        self.responder.computes.store(group, Ordering::SeqCst);
    }

    /// Sets the group in which the member's wait timed out; 0 for none.
    pub fn set_gave_up(&self, group: u64) {
        self.responder.gave_up.store(group, Ordering::SeqCst);
    }
}

impl Responder {
    fn report(&self) -> Report {
        Report {
            computes: self.computes.load(Ordering::SeqCst),
            gave_up: self.gave_up.load(Ordering::SeqCst),
        }
    }
}

impl Drop for ProbeServer {
    fn drop(&mut self) {
        self.responder.is_closed.store(true, Ordering::SeqCst);
        wake(self.address);
    }
}

/// Answers all clients from one thread while the server is open.
fn serve(listener: &TcpListener, responder: &Responder) {
    let mut clients: Vec<Client> = Vec::new();
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    loop {
        let mut has_come = await_any(listener, &clients).into_iter();
        if responder.is_closed.load(Ordering::SeqCst) {
            return; // clients notice, as their connections close
        }
        // An error closes only this client's connection.
        clients.retain_mut(|client| {
            let is_ready = has_come.next().unwrap_or(false) || client.heard.elapsed() >= PATIENCE;
            !is_ready || client.answer(responder).is_ok()
        });
        for _ in 0..ACCEPTS {
            match listener.accept() {
                Ok((stream, _)) if clients.len() < MAX_CONNECTIONS => clients.extend(Client::new(stream)),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    thread::sleep(PAUSE); // perhaps out of descriptors: other connections close meanwhile
                    break;
                }
            }
        }
    }
}

/// Waits until a client connects, sends something, hangs up or exceeds the silence limit; returns which clients are ready.
fn await_any(listener: &TcpListener, clients: &[Client]) -> Vec<bool> {
    let descriptors = clients.iter().map(|each| each.stream.as_raw_fd()).chain([listener.as_raw_fd()]);
    let mut polled: Vec<_> =
        descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let oldest = clients.iter().map(|each| PATIENCE.saturating_sub(each.heard.elapsed())).min();
    let limit = oldest.map_or(-1, |left| left.as_millis() as i32 + 1);
    // SAFETY: pointer and length are those of the vector, and the borrowed descriptors are open.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
    polled.iter().map(|each| each.revents != 0).collect()
}

/// A connected client.
struct Client {
    stream: TcpStream,
    /// Bytes received of its next probe.
    probe: Vec<u8>,
    /// When it last sent something.
    heard: Instant,
}

impl Client {
    fn new(stream: TcpStream) -> Option<Self> {
        stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).ok()?;
        Some(Self { stream, probe: Vec::new(), heard: Instant::now() })
    }

    /// Answers all complete probes. Fails if the client has hung up, is no member, or was silent for too long.
    fn answer(&mut self, responder: &Responder) -> std::io::Result<()> {
        let (member, secret) = (&responder.member, responder.secret.as_ref());
        let mut room = [0; READ_BYTES];
        // One read: a client that never stops sending must not keep the others from being served.
        match self.stream.read(&mut room) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(come) => self.probe.extend(&room[..come]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                let is_silent = self.heard.elapsed() >= PATIENCE;
                return if is_silent { Err(ErrorKind::TimedOut.into()) } else { Ok(()) };
            }
            Err(error) => return Err(error),
        }
        self.heard = Instant::now();
        while self.probe.len() >= probe_bytes(secret) {
            let rest = self.probe.split_off(probe_bytes(secret));
            let number = read_probe(&mut &self.probe[..], member, secret)?;
            self.probe = rest;
            let report = responder.report().to_bytes();
            // These few bytes fit into the socket's buffer unless the client does not read.
            self.stream.write_all(&[&report[..], &proof(member, number, &report, secret)].concat())?;
        }
        Ok(())
    }
}

/// Gives this thread its own table of descriptors that holds only the listener and the standard streams; returns whether
/// that worked.
///
/// The kernel frees the memory of a killed process before it closes descriptors that its threads share, which takes a
/// second for some ten gigabytes. A descriptor of one thread alone is closed as soon as that thread ends, unless it is the
/// last thread. So other members notice at once that the process has ended. Child processes, such as data loaders, do not
/// inherit the listener either, and so cannot keep it open.
fn keep_alone(listener: &TcpListener) -> bool {
    let own = listener.as_raw_fd() as libc::c_uint;
    let close = |first: libc::c_uint, last: libc::c_uint, flags: libc::c_uint| {
        // SAFETY: the call takes three numbers and closes descriptors in this thread's table only, which is private from
        // the first call on. This thread uses no other descriptor.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) == 0 }
    };
    let is_alone = close(own + 1, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE);
    if is_alone && own > STREAMS {
        close(STREAMS, own - 1, 0);
    }
    is_alone
}

/// Blocks all signals on this thread: a handler may write to descriptors that are not in this thread's table.
fn block_signals() {
    let mut all = MaybeUninit::uninit();
    // SAFETY: the first call initialises the set that the second one reads; the old set is not requested.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}
