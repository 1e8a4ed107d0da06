//! The threads of one connection: on the requesting side and on the sending side.

use super::item::Item;
use super::table::{Handover, Key, Table};
use super::ucx::{self, Introduction, Receiver, Sender};
use super::wire::{HAS_COME, Hello, Request, Timed, explain, greet};
use super::zero_copy::ZeroCopy;
use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time in which the other side must send its UCX address.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which a thread checks whether the kernel still reads sent memory, while nothing else is to be sent.
const PAUSE: Duration = Duration::from_micros(200);
/// The same interval once nothing will be sent any more.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// The requesting side: one connection, made when it is first needed.
#[derive(Debug, Default)]
pub(super) struct Asking(Mutex<Stage>);

#[derive(Debug, Default)]
enum Stage {
    #[default]
    New,
    /// Requests that are sent once it is connected.
    Connecting(Vec<Request>),
    Connected(Arc<TcpStream>),
}

impl Asking {
    /// Requests a message, now or as soon as it is connected. `number`: of this connection among those to the member.
    pub(super) fn ask(self: &Arc<Self>, table: &Arc<Table>, peer: usize, number: usize, request: Request) {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failure = match &mut *stage {
            Stage::Connecting(requests) => {
                requests.push(request);
                None
            }
            Stage::Connected(stream) => (&**stream).write_all(&request.to_bytes()).map_err(explain).err(),
            Stage::New => {
                *stage = Stage::Connecting(vec![request]);
                let (asking, inside) = (self.clone(), table.clone());
                let thread =
                    thread::Builder::new().stack_size(table.stack_bytes()).name("evermoe-receive".into());
                thread.spawn(move || asking.run(&inside, peer, number)).err()
            }
        };
        drop(stage);
        if let Some(error) = failure {
            table.lose(peer, &error.to_string());
        }
    }

    /// Writes a request; requests of several threads do not interleave.
    fn say(&self, mut stream: &TcpStream, what: Request) -> Result<()> {
        let _stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&what.to_bytes())
    }

    fn run(&self, table: &Table, peer: usize, number: usize) {
        if let Err(error) = self.receive_all(table, peer, number) {
            table.lose(peer, &error.to_string());
        }
    }

    fn receive_all(&self, table: &Table, peer: usize, number: usize) -> Result<()> {
        let stream = Arc::new(connect(table, peer, number)?);
        if !table.keep(peer, &stream) {
            return Ok(()); // the transfers were failed already
        }
        let mut by_ucx = table.ucx.map(|ucx| Receiver::new(ucx, &stream)).transpose()?;
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Connecting(requests) = std::mem::replace(&mut *stage, Stage::Connected(stream.clone()))
        {
            let mut bytes = by_ucx.as_ref().map_or(Vec::new(), |receiver| receiver.introduction().to_vec());
            bytes.extend(requests.into_iter().flat_map(Request::to_bytes));
            (&*stream).write_all(&bytes)?;
        }
        drop(stage);
        loop {
            let Request { tag, number, room: nbytes } = Request::read(&stream)?;
            let wrong = |why: &str| {
                Error::new(ErrorKind::InvalidData, format!("message {number} with tag {tag} {why}"))
            };
            let item = table.take_expected((peer, tag, number)).ok_or_else(|| wrong("was not asked for"))?;
            if nbytes > item.nbytes() as u64 {
                return Err(wrong("is larger than its receive buffer"));
            }
            if !item.begin() {
                return Err(wrong("was cancelled by the receiver"));
            }
            let nbytes = usize::try_from(nbytes).unwrap_or(usize::MAX);
            // SAFETY: `begin` returned true, and the room has at least this size.
            let room = unsafe { item.room(nbytes) };
            let result = match &mut by_ucx {
                Some(receiver) if nbytes >= ucx::MIN_BYTES => receiver
                    .receive(&stream, room)
                    .and_then(|()| self.say(&stream, Request { tag, number, room: HAS_COME }))
                    .and_then(|()| receiver.confirm(&stream)),
                _ => (&*stream).read_exact(room),
            };
            let result = result.map_err(explain);
            item.finish(result.as_ref().map(|()| nbytes).map_err(|error| format!("rank {peer}: {error}")));
            result?;
        }
    }
}

fn connect(table: &Table, peer: usize, number: usize) -> Result<TcpStream> {
    let deadline = Instant::now() + table.limit;
    let cards: Vec<&str> = table.addresses[peer].split(',').collect();
    let mut result = Err(ErrorKind::NotFound.into());
    for turn in 0..cards.len() {
        // Pairs of members begin with different cards.
        let card = cards[(table.rank + peer + number + turn) % cards.len()];
        let share = deadline.saturating_duration_since(Instant::now()) / (cards.len() - turn) as u32;
        result = connect_to(card, Instant::now() + share);
        if result.is_ok() {
            break;
        }
    }
    let stream = result?;
    let hello = Hello { group: table.group, rank: table.rank as u64, by_ucx: table.ucx.is_some() };
    let left = deadline.saturating_duration_since(Instant::now());
    Timed::talk(&stream, left, |stream| greet(stream, hello, table.secret.as_ref())).map_err(explain)?;
    Ok(stream)
}

fn connect_to(name: &str, deadline: Instant) -> Result<TcpStream> {
    let mut result = Err(Error::new(ErrorKind::NotFound, "the host name resolves to no address"));
    for address in name.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        result = TcpStream::connect_timeout(&address, left);
        if result.is_ok() {
            break;
        }
    }
    result
}

/// The sending side: one thread reads requests, while another sends the messages that are ready.
pub(super) fn serve(table: &Arc<Table>, hello: Hello, stream: TcpStream) {
    let peer = usize::try_from(hello.rank).unwrap_or(usize::MAX);
    if peer >= table.addresses.len() || peer == table.rank {
        return;
    }
    let (come, has_come) = channel();
    let by_ucx = match introduced(table, hello, &stream, has_come) {
        Ok(by_ucx) => by_ucx,
        Err(error) => return table.lose(peer, &error.to_string()),
    };
    let stream = Arc::new(stream);
    if !table.keep(peer, &stream) {
        return;
    }
    let (thread, queue) = channel();
    let (inside, writing) = (table.clone(), stream.clone());
    let builder = thread::Builder::new().stack_size(table.stack_bytes()).name("evermoe-send".into());
    let started = builder.spawn(move || send_all(&inside, peer, &writing, &queue, by_ucx));
    let error = started.err().unwrap_or_else(|| read_all(table, peer, &stream, &thread, come));
    table.lose(peer, &error.to_string());
}

/// The UCX sender, if both sides use UCX.
fn introduced(
    table: &Table,
    hello: Hello,
    stream: &TcpStream,
    come: mpsc::Receiver<()>,
) -> Result<Option<Sender>> {
    Hello { by_ucx: table.ucx.is_some(), ..hello }.check_same(hello.by_ucx)?;
    let Some(ucx) = table.ucx else { return Ok(None) };
    let receiver = Timed::talk(stream, PATIENCE, Introduction::read).map_err(explain)?;
    Ok(Some(Sender::new(ucx, receiver, come)))
}

/// Reads requests until the connection ends; returns the reason. `come` ends with it.
fn read_all(
    table: &Table,
    peer: usize,
    stream: &TcpStream,
    thread: &Handover,
    come: mpsc::Sender<()>,
) -> Error {
    loop {
        match Request::read(stream) {
            Ok(Request { room: HAS_COME, .. }) => {
                // An error means that the connection is ending.
                let _heard = come.send(());
            }
            Ok(request) => table.requested(peer, request, thread),
            Err(error) => return error,
        }
    }
}

fn send_all(
    table: &Table,
    peer: usize,
    mut stream: &TcpStream,
    queue: &mpsc::Receiver<(Key, Arc<Item>)>,
    mut by_ucx: Option<Sender>,
) {
    let mut sender = ZeroCopy::new(stream);
    let mut under_way = UnderWay::default();
    loop {
        let next = if under_way.0.is_empty() {
            queue.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            queue.recv_timeout(PAUSE)
        };
        let result = match next {
            Ok(((_, tag, number), item)) => {
                if !item.begin() {
                    sender.abandon();
                    under_way.fail(peer, "the connection has ended");
                    return table.lose(peer, "a message that it waits for was cancelled");
                }
                let header = Request { tag, number, room: item.nbytes() as u64 };
                // SAFETY: `begin` returned true.
                let bytes = unsafe { item.bytes() };
                let result = stream.write_all(&header.to_bytes());
                let result = result.and_then(|()| match &mut by_ucx {
                    Some(by_ucx) if bytes.len() >= ucx::MIN_BYTES => {
                        by_ucx.send(stream, bytes).and(sender.send(&[]))
                    }
                    _ => sender.send(bytes),
                });
                let result = result.map_err(explain);
                under_way.0.push_back((*result.as_ref().unwrap_or(&0), item));
                result.map(|_| ())
            }
            Err(RecvTimeoutError::Timeout) => sender.look().map_err(explain),
            Err(RecvTimeoutError::Disconnected) if under_way.0.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => sender.wait(LAST_LOOK).map_err(explain),
        };
        if let Err(error) = result {
            sender.abandon();
            under_way.fail(peer, &error.to_string());
            return table.lose(peer, &error.to_string());
        }
        under_way.finish(&sender);
    }
}

/// Sent messages whose memory the kernel may still read, with the numbers returned by `ZeroCopy::send`.
#[derive(Default)]
struct UnderWay(VecDeque<(u32, Arc<Item>)>);

impl UnderWay {
    fn finish(&mut self, sender: &ZeroCopy<'_>) {
        while self.0.front().is_some_and(|&(calls, _)| sender.has_ended(calls)) {
            if let Some((_, item)) = self.0.pop_front() {
                item.finish(Ok(item.nbytes()));
            }
        }
    }

    fn fail(&mut self, peer: usize, reason: &str) {
        for (_, item) in self.0.drain(..) {
            item.finish(Err(format!("rank {peer}: {reason}")));
        }
    }
}
