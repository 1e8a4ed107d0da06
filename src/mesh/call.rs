//! The connections of one member, and a call's messages.

use super::bytes::Bytes;
use super::inbox::{Frame, Inbox, Stop};
use super::{COLLECTIVE, Header};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Largest message that is sent together with its header.
const JOINED_BYTES: usize = 16 << 10;
/// Longest wait until a thread checks for signals: one that comes just before a wait does not interrupt it.
const SIGNAL_CHECK: Duration = Duration::from_secs(1);

/// A member's connections to all others.
///
/// ```
/// use evermoe::mesh::{Bytes, COLLECTIVE, Listening, Mesh};
/// use std::time::Duration;
/// let limit = Duration::from_secs(5);
/// let listening = [Listening::open(None)?, Listening::open(None)?];
/// let names: Vec<_> = listening.iter().map(|each| format!("127.0.0.1:{}", each.name())).collect();
/// let gather = |rank: usize, mesh: Mesh| {
///     let (mut own, mut all) = ([rank as u8 + 7], [0; 2]);
///     let place = |address: *mut u8| Bytes { address, length: 1 };
///     let receives = [0, 1].map(|at| place(all.as_mut_ptr().wrapping_add(at)));
///     // SAFETY: the arrays live until the call returns, and nothing else uses them.
///     unsafe { mesh.all_to_all(COLLECTIVE, &[place(own.as_mut_ptr()); 2], &receives, limit) }.unwrap();
///     all
/// };
/// let found = std::thread::scope(|scope| {
///     let run = |(rank, each): (usize, Listening)| {
///         let names = &names;
///         scope.spawn(move || gather(rank, each.connect(rank, names, limit).unwrap()))
///     };
///     let threads: Vec<_> = listening.into_iter().enumerate().map(run).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
/// });
/// assert_eq!(found, [[7, 8]; 2]);
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Debug)]
pub struct Mesh {
    rank: usize,
    streams: Vec<Option<Arc<TcpStream>>>,
    inside: Mutex<Inside>,
    /// The process that has connected the members. A fork of it shares the sockets, and must not close them.
    process: u32,
}

#[derive(Debug)]
struct Inside {
    rank: usize,
    peers: Vec<Option<Peer>>,
    /// Handles signals while a call waits; the call fails if it returns false.
    handle_signals: fn() -> bool,
    /// Number of collectives so far.
    number: u32,
    /// Failure after which there are no more calls.
    failure: Option<String>,
}

/// What is still to be sent of a message.
#[derive(Debug)]
enum Part {
    /// Bytes of its own, and how many of them are sent.
    Copied(Vec<u8>, usize),
    /// Memory of the call.
    Rest(Bytes),
}

/// The connection to one member, and the messages of the current call.
#[derive(Debug)]
struct Peer {
    stream: Arc<TcpStream>,
    inbox: Inbox,
    awaited: VecDeque<Frame>,
    outgoing: VecDeque<Part>,
    /// Whether the member is in another collective, so that this call waits for it in vain.
    is_elsewhere: bool,
}

impl Mesh {
    pub(super) fn new(rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Self> {
        let failed = |error| Error::io("preparing the connections of members", error);
        let mut peers = Vec::new();
        for stream in streams {
            if let Some(stream) = &stream {
                let prepare = || {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(None)?;
                    stream.set_nonblocking(true)
                };
                prepare().map_err(failed)?;
            }
            peers.push(stream.map(|stream| Peer::new(Arc::new(stream))));
        }
        let streams = peers.iter().map(|peer| peer.as_ref().map(|peer| peer.stream.clone())).collect();
        let inside = Inside { rank, peers, handle_signals: || true, number: 0, failure: None };
        Ok(Self { rank, streams, inside: Mutex::new(inside), process: std::process::id() })
    }

    /// Calls a function while a call waits, at once or within 1 s of a signal. The call fails if it returns false.
    #[must_use]
    pub fn with_signals(self, handle_signals: fn() -> bool) -> Self {
        self.lock().handle_signals = handle_signals;
        self
    }

    /// Sends to each member its part, and receives one from each; collective. The own part is copied.
    ///
    /// A failure is returned as its reason; after it all calls fail.
    ///
    /// # Arguments
    /// * `tag`: kind of the collective, with the bit [`COLLECTIVE`].
    /// * `sends`, `receives`: by rank.
    /// * `limit`: longest time in which no byte moves.
    ///
    /// # Safety
    /// The memory of `sends` is valid and does not change meanwhile. That of `receives` is valid, without overlaps, and
    /// nothing else uses it.
    pub unsafe fn all_to_all(
        &self,
        tag: u32,
        sends: &[Bytes],
        receives: &[Bytes],
        limit: Duration,
    ) -> std::result::Result<(), String> {
        let size = self.streams.len();
        if sends.len() != size || receives.len() != size || tag & COLLECTIVE == 0 {
            return Err(format!("expected a part for each of {size} members, and a collective's tag"));
        }
        let (own, into) = (sends[self.rank], receives[self.rank]);
        if own.length != into.length {
            return Err(format!("rank {} sends itself {} bytes for {}", self.rank, own.length, into.length));
        }
        // SAFETY: as required above.
        unsafe { into.as_mut_slice().copy_from_slice(own.as_slice()) };
        let mut inside = self.lock();
        if let Some(rank) = inside.find_closed() {
            return Err(inside.fail(closed(rank)));
        }
        inside.number = inside.number.wrapping_add(1);
        let frame = |number, bytes: Bytes| Frame {
            header: Header { tag, number, length: bytes.length as u64 },
            bytes,
        };
        let number = inside.number;
        for (rank, peer) in inside.peers.iter_mut().enumerate() {
            if let Some(peer) = peer {
                peer.queue(frame(number, sends[rank]));
                peer.awaited.push_back(frame(number, receives[rank]));
            }
        }
        inside.run(limit)
    }

    /// Sends messages to members, and receives some from them. A failure is returned as its reason.
    ///
    /// # Arguments
    /// * `tag`: of these messages, without the bit [`COLLECTIVE`]. Messages of one tag keep their order.
    /// * `sends`, `receives`: ranks of other members, and memory.
    /// * `limit`: longest time in which no byte moves.
    ///
    /// # Safety
    /// As of [`Self::all_to_all`].
    pub unsafe fn exchange(
        &self,
        tag: u32,
        sends: &[(usize, Bytes)],
        receives: &[(usize, Bytes)],
        limit: Duration,
    ) -> std::result::Result<(), String> {
        let mut inside = self.lock();
        let frame =
            |bytes: Bytes| Frame { header: Header { tag, number: 0, length: bytes.length as u64 }, bytes };
        if tag & COLLECTIVE != 0 || !sends.iter().chain(receives).all(|(rank, _)| inside.has(*rank)) {
            return Err("expected ranks of other members, and no collective's tag".into());
        }
        for &(rank, bytes) in sends {
            if let Some(peer) = &mut inside.peers[rank] {
                peer.queue(frame(bytes));
            }
        }
        for &(rank, bytes) in receives {
            if let Some(peer) = &mut inside.peers[rank] {
                peer.awaited.push_back(frame(bytes));
            }
        }
        inside.run(limit)
    }

    /// Sends a message to members without waiting until they have room for it. A failure is returned as its reason.
    ///
    /// What the system does not take at once is sent with the next call.
    pub fn post(&self, tag: u32, bytes: &[u8], ranks: &[usize]) -> std::result::Result<(), String> {
        let mut inside = self.lock();
        if let Some(failure) = &inside.failure {
            return Err(failure.clone());
        }
        if tag & COLLECTIVE != 0 || !ranks.iter().all(|&rank| inside.has(rank)) {
            return Err("expected ranks of other members, and no collective's tag".into());
        }
        let header = Header { tag, number: 0, length: bytes.len() as u64 };
        for &rank in ranks {
            if let Some(peer) = &mut inside.peers[rank] {
                peer.outgoing.push_back(Part::Copied([&header.to_bytes(), bytes].concat(), 0));
                if peer.send().is_err() {
                    return Err(inside.fail(closed(rank)));
                }
            }
        }
        Ok(())
    }

    /// Closes the connections, from any thread: calls under way end, here and on the other members.
    pub fn close(&self) {
        for stream in self.streams.iter().flatten() {
            // It may be closed by now.
            let _closed = stream.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.close();
        }
    }
}

impl Inside {
    fn has(&self, rank: usize) -> bool {
        self.peers.get(rank).is_some_and(Option::is_some)
    }

    /// Returns a member that has closed its connection. Before this member has sent its part, no other one can have
    /// finished the collective: it has given up, though its own part may have come.
    fn find_closed(&self) -> Option<usize> {
        let connected =
            || self.peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)));
        let events = libc::POLLRDHUP;
        let mut polled: Vec<_> = connected()
            .map(|(_, peer)| libc::pollfd { fd: peer.stream.as_raw_fd(), events, revents: 0 })
            .collect();
        // SAFETY: `polled` is valid for its length, and its descriptors are kept open by `peers`.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        let mut all = connected().zip(&polled);
        if ready > 0 { all.find(|(_, each)| each.revents != 0).map(|((rank, _), _)| rank) } else { None }
    }

    fn fail(&mut self, failure: String) -> String {
        for peer in self.peers.iter_mut().flatten() {
            *peer = Peer::new(peer.stream.clone()); // the memory of the call is not used after it
            let _closed = peer.stream.shutdown(Shutdown::Both);
        }
        self.failure.get_or_insert(failure).clone()
    }

    /// Moves the messages of a call.
    fn run(&mut self, limit: Duration) -> std::result::Result<(), String> {
        let moved = self.failure.clone().map_or_else(|| self.move_all(limit), Err);
        moved.map_err(|failure| self.fail(failure))
    }

    fn move_all(&mut self, limit: Duration) -> std::result::Result<(), String> {
        let (own, size) = (self.rank, self.peers.len());
        let order = || (own + 1..size).chain(0..own); // not all begin with the same member
        for rank in order() {
            if let Some(peer) = &mut self.peers[rank] {
                peer.send().map_err(|_| closed(rank))?;
                let taken = peer.inbox.take(&mut peer.awaited);
                peer.settle(taken, rank)?;
            }
        }
        let mut since = Instant::now();
        let mut polled = Vec::with_capacity(size);
        let mut waiting = Vec::with_capacity(size);
        loop {
            polled.clear();
            waiting.clear();
            let mut is_over = true;
            for rank in order() {
                if let Some(peer) = &self.peers[rank] {
                    let events = peer.events();
                    is_over &= peer.is_over();
                    if events != 0 {
                        polled.push(libc::pollfd { fd: peer.stream.as_raw_fd(), events, revents: 0 });
                        waiting.push(rank);
                    }
                }
            }
            if is_over {
                return Ok(());
            }
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Err(self.silence(limit));
            }
            let milliseconds = i32::try_from(left.min(SIGNAL_CHECK).as_millis()).unwrap_or(i32::MAX).max(1);
            // SAFETY: `polled` is valid for its length, and its descriptors are kept open by `peers`.
            let ready =
                unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
            if ready <= 0 {
                if !(self.handle_signals)() {
                    return Err("a signal has ended the wait".into());
                }
                continue;
            }
            since = Instant::now();
            for (each, &rank) in polled.iter().zip(&waiting) {
                let Some(peer) = &mut self.peers[rank] else { continue };
                if each.revents & libc::POLLOUT != 0 {
                    peer.send().map_err(|_| closed(rank))?;
                }
                if each.revents & !libc::POLLOUT != 0 {
                    let read = peer.inbox.read(&peer.stream, &mut peer.awaited);
                    peer.settle(read, rank)?;
                }
            }
        }
    }

    /// The failure if no byte has moved for the time limit.
    fn silence(&self, limit: Duration) -> String {
        let seconds = limit.as_secs_f64();
        let of = |test: fn(&Peer) -> bool| {
            let is = |(rank, peer): (usize, &Option<Peer>)| peer.as_ref().is_some_and(test).then_some(rank);
            self.peers.iter().enumerate().filter_map(is).collect::<Vec<_>>()
        };
        let elsewhere = of(|peer| peer.is_elsewhere);
        if elsewhere.is_empty() {
            let silent = of(|peer| !peer.is_over());
            format!("timed out: nothing from ranks {silent:?} for {seconds} s")
        } else {
            format!("timed out after {seconds} s: ranks {elsewhere:?} are in another collective")
        }
    }
}

impl Peer {
    fn new(stream: Arc<TcpStream>) -> Self {
        Self {
            stream,
            inbox: Inbox::new(),
            awaited: VecDeque::new(),
            outgoing: VecDeque::new(),
            is_elsewhere: false,
        }
    }

    fn is_over(&self) -> bool {
        self.outgoing.is_empty() && self.awaited.is_empty()
    }

    /// Events to wait for.
    fn events(&self) -> libc::c_short {
        let mut events = 0;
        if !self.outgoing.is_empty() {
            events |= libc::POLLOUT;
        }
        if !(self.awaited.is_empty() || self.is_elsewhere) {
            events |= libc::POLLIN;
        }
        events
    }

    fn settle(
        &mut self,
        result: std::result::Result<(), Stop>,
        rank: usize,
    ) -> std::result::Result<(), String> {
        match result {
            Err(Stop::Closed) => Err(closed(rank)),
            Err(Stop::Elsewhere) => {
                self.is_elsewhere = true;
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Prepares to send a message: a short one together with its header.
    fn queue(&mut self, frame: Frame) {
        let header = frame.header.to_bytes();
        if frame.bytes.length <= JOINED_BYTES {
            // SAFETY: the caller of `Mesh`'s function keeps the memory valid and unchanged.
            let bytes = unsafe { frame.bytes.as_slice() };
            self.outgoing.push_back(Part::Copied([&header[..], bytes].concat(), 0));
        } else {
            self.outgoing.push_back(Part::Copied(header.into(), 0));
            self.outgoing.push_back(Part::Rest(frame.bytes));
        }
    }

    /// Sends as much as the system takes at once.
    fn send(&mut self) -> std::io::Result<()> {
        while let Some(part) = self.outgoing.front_mut() {
            let bytes = match part {
                Part::Copied(bytes, sent) => &bytes[*sent..],
                // SAFETY: as above, until the call ends.
                Part::Rest(bytes) => unsafe { bytes.as_slice() },
            };
            let all = bytes.len();
            match (&*self.stream).write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) if n == all => _ = self.outgoing.pop_front(),
                Ok(n) => match part {
                    Part::Copied(_, sent) => *sent += n,
                    Part::Rest(bytes) => *bytes = bytes.skip(n),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn closed(rank: usize) -> String {
    format!("rank {rank} has closed its connection")
}
