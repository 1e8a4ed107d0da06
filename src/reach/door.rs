//! The side that answers.

use super::{Said, knock_bytes, listen, proof, read_knock, wake};
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

/// Connections that are answered at a time; more are closed at once.
const MAX_CONNECTIONS: usize = 4096;
/// How long a connection may be silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time after which one is accepted again, where the system had no room for it.
const PAUSE: Duration = Duration::from_millis(10);
/// Connections that are accepted before visitors have their turn again.
const ACCEPTS: usize = 128;
/// Descriptors of the standard streams.
const STREAMS: libc::c_uint = 3;
/// Bytes that are read at a time.
const KNOCK_BYTES: usize = 64;

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
        let (inside, shared) = (keeper.clone(), listener.as_raw_fd());
        let (report, is_alone) = mpsc::channel();
        thread::Builder::new()
            .name("evermoe-door".into())
            .spawn(move || {
                block_signals();
                // Who opens the door waits for it.
                let _heard = report.send(keep_alone(&listener));
                serve(&listener, &inside);
            })
            .map_err(failed)?;
        if is_alone.recv().unwrap_or(false) {
            // SAFETY: this descriptor was the listener's, which the thread owns, and closes in its own table. Nobody else
            // closes it in this one.
            unsafe { libc::close(shared) };
        }
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

impl Keeper {
    fn said(&self) -> Said {
        Said { computes: self.computes.load(Ordering::SeqCst), gave_up: self.gave_up.load(Ordering::SeqCst) }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.keeper.is_closed.store(true, Ordering::SeqCst);
        wake(self.address);
    }
}

/// Answers from one thread, for as long as the door is open.
fn serve(listener: &TcpListener, keeper: &Keeper) {
    let mut visitors: Vec<Visitor> = Vec::new();
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    loop {
        let mut has_come = await_any(listener, &visitors).into_iter();
        if keeper.is_closed.load(Ordering::SeqCst) {
            return; // who asks learns so, as nothing is answered any more
        }
        // An error ends the connection, and nothing else.
        visitors.retain_mut(|visitor| {
            let is_due = has_come.next().unwrap_or(false) || visitor.heard.elapsed() >= PATIENCE;
            !is_due || visitor.talk(keeper).is_ok()
        });
        for _ in 0..ACCEPTS {
            match listener.accept() {
                Ok((stream, _)) if visitors.len() < MAX_CONNECTIONS => visitors.extend(Visitor::new(stream)),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    thread::sleep(PAUSE); // out of descriptors, perhaps: others end meanwhile
                    break;
                }
            }
        }
    }
}

/// Waits until somebody connects, asks or hangs up, or has been silent for too long. Which visitors did something.
fn await_any(listener: &TcpListener, visitors: &[Visitor]) -> Vec<bool> {
    let descriptors = visitors.iter().map(|each| each.stream.as_raw_fd()).chain([listener.as_raw_fd()]);
    let mut polled: Vec<_> =
        descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let oldest = visitors.iter().map(|each| PATIENCE.saturating_sub(each.heard.elapsed())).min();
    let limit = oldest.map_or(-1, |left| left.as_millis() as i32 + 1);
    // SAFETY: the pointer and the length are those of the vector, and all descriptors are open: they are borrowed.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
    polled.iter().map(|each| each.revents != 0).collect()
}

/// One that has connected.
struct Visitor {
    stream: TcpStream,
    /// What has come of its next knock.
    knock: Vec<u8>,
    /// When it has sent something.
    heard: Instant,
}

impl Visitor {
    fn new(stream: TcpStream) -> Option<Self> {
        stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).ok()?;
        Some(Self { stream, knock: Vec::new(), heard: Instant::now() })
    }

    /// Answers what has come. An error: it has hung up, is no member, or was silent for too long.
    fn talk(&mut self, keeper: &Keeper) -> std::io::Result<()> {
        let (member, secret) = (&keeper.member, keeper.secret.as_ref());
        let mut room = [0; KNOCK_BYTES];
        // Once: of one who sends without end the rest waits until others have had their turn.
        match self.stream.read(&mut room) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(come) => self.knock.extend(&room[..come]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                let is_silent = self.heard.elapsed() >= PATIENCE;
                return if is_silent { Err(ErrorKind::TimedOut.into()) } else { Ok(()) };
            }
            Err(error) => return Err(error),
        }
        self.heard = Instant::now();
        while self.knock.len() >= knock_bytes(secret) {
            let rest = self.knock.split_off(knock_bytes(secret));
            let number = read_knock(&mut &self.knock[..], member, secret)?;
            self.knock = rest;
            let said = keeper.said().to_bytes();
            // So few bytes that one who reads them has room for them.
            self.stream.write_all(&[&said[..], &proof(member, number, &said, secret)].concat())?;
        }
        Ok(())
    }
}

/// Gives this thread a table of descriptors of its own, with the listener and the standard streams alone in it. Whether
/// it has one.
///
/// The system frees a killed process's memory before it closes what its threads share, which takes a second for some ten
/// gigabytes. What one thread alone has open is closed as that thread ends, unless it is the last one to: so others learn
/// at once that the process has ended. Nor do its children, such as those that load data, get the listener and keep it open.
fn keep_alone(listener: &TcpListener) -> bool {
    let own = listener.as_raw_fd() as libc::c_uint;
    let close = |first: libc::c_uint, last: libc::c_uint, flags: libc::c_uint| {
        // SAFETY: the call takes three numbers. What it closes, it closes in this thread's table, which is its own from
        // the first call on; nothing else that this thread uses is open there.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) == 0 }
    };
    let is_alone = close(own + 1, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE);
    if is_alone && own > STREAMS {
        close(STREAMS, own - 1, 0);
    }
    is_alone
}

/// Leaves signals to other threads: what handles them may write to descriptors that this one does not have.
fn block_signals() {
    let mut all = MaybeUninit::uninit();
    // SAFETY: the first call writes the set that the second one reads; the old set is not asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}
