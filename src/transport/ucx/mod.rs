//! Bytes of long messages by UCX: by RDMA where the network has it, else by what UCX has found.
//!
//! The connection of a message's tag and number stays the one that carries requests and headers, and tells of losses. Each
//! has a worker of UCX at both ends, which its threads alone use, and no thread of UCX's moves bytes:
//!
//! ```text
//! receiver                                       sender
//!    │ hello … its worker's address ───────────►  │ connects to the worker
//!    │ request(tag, number, room) ─────────────►  │
//!    │  ◄────────────── header(tag, number, length)│ once it is there
//!    │  ◄═════════════════════════ bytes, by UCX  │ the receiver reads them from the sender's memory
//!    │ has come(tag, number) ──────────────────►  │
//!    │  ◄───────────────────────────────── number │ the bytes were the message's until they had come
//! ```
//!
//! When the connection ends, both give up: they end their workers, and only then say that the message has failed. What an
//! RDMA network, or the kernel, still reads of a sender's memory then is never taken for a message: its number is missing.

mod address;
mod ffi;
mod library;
mod worker;

pub(crate) use library::Ucx;

use super::wire::explain;
use crate::reach::unforeseen;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use worker::Worker;

/// Shorter messages go by the connection itself, which takes less time.
pub(super) const MIN_BYTES: usize = 64 << 10;
/// Bytes that say a message's tag.
const WORD: usize = 8;

/// The end of a connection that receives.
pub(super) struct Receiver {
    /// None once a message has failed.
    worker: Option<Worker>,
    introduction: Vec<u8>,
    next: u64,
}

impl Receiver {
    /// The other side reaches it where its connection does.
    pub(super) fn new(ucx: &'static Ucx, stream: &TcpStream) -> Result<Self> {
        let worker = Worker::at(ucx, stream.local_addr()?.ip())?;
        let address = worker.address().map_or_else(String::new, |address| address.to_string());
        let tag = unforeseen();
        let introduction = [&tag[..], &[address.len() as u8], address.as_bytes()].concat();
        Ok(Self { worker: Some(worker), introduction, next: u64::from_le_bytes(tag) })
    }

    /// What the other side has to know first.
    pub(super) fn introduction(&self) -> &[u8] {
        &self.introduction
    }

    /// Receives a message of this length. When it returns, nothing writes into the room any more.
    pub(super) fn receive(&mut self, stream: &TcpStream, room: &mut [u8]) -> Result<()> {
        let result = self.receive_bytes(stream, room);
        if result.is_err() {
            self.worker = None;
        }
        result
    }

    fn receive_bytes(&mut self, stream: &TcpStream, room: &mut [u8]) -> Result<()> {
        let worker = self.worker.as_mut().ok_or(ErrorKind::ConnectionReset)?;
        // SAFETY: where one of both fails, the worker ends before the caller has its memory back.
        unsafe { worker.receive(room, self.next) }?;
        let nbytes = worker.wait(stream)?;
        if nbytes == room.len() { Ok(()) } else { Err(wrong("it has sent another message than it said")) }
    }

    /// Waits until the sender, which knows that the bytes have come, says that they were the message's.
    pub(super) fn confirm(&mut self, mut stream: &TcpStream) -> Result<()> {
        let mut whole = [0; WORD];
        stream.read_exact(&mut whole)?;
        if u64::from_le_bytes(whole) != self.next {
            return Err(wrong("it has sent another message than it said"));
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }
}

fn wrong(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// What a receiver has said about itself.
pub(super) struct Introduction {
    next: u64,
    address: SocketAddr,
}

impl Introduction {
    pub(super) fn read(stream: &mut impl Read) -> Result<Self> {
        let (mut tag, mut nbytes) = ([0; WORD], [0]);
        stream.read_exact(&mut tag)?;
        stream.read_exact(&mut nbytes)?;
        let mut address = vec![0; usize::from(nbytes[0])];
        stream.read_exact(&mut address)?;
        let address = std::str::from_utf8(&address).ok().and_then(|text| text.parse().ok());
        Ok(Self {
            next: u64::from_le_bytes(tag),
            address: address.ok_or_else(|| wrong("it has no address for UCX"))?,
        })
    }
}

/// The end of a connection that sends.
pub(super) struct Sender {
    ucx: &'static Ucx,
    receiver: Introduction,
    /// Says each time that a message has come; ends with the connection. UCX says no such thing: what it has sent may be on
    /// its way, or lost with the other side.
    come: mpsc::Receiver<()>,
    /// None until there is a long message, and once one has failed.
    worker: Option<Worker>,
}

impl Sender {
    pub(super) fn new(ucx: &'static Ucx, receiver: Introduction, come: mpsc::Receiver<()>) -> Self {
        Self { ucx, receiver, come, worker: None }
    }

    /// Sends a message, whose header the other side has. When it returns, nothing of this member reads the bytes any more.
    pub(super) fn send(&mut self, stream: &TcpStream, bytes: &[u8]) -> Result<()> {
        let result = self.send_whole(stream, bytes).map_err(explain);
        if result.is_err() {
            self.worker = None;
        }
        result
    }

    fn send_whole(&mut self, mut stream: &TcpStream, bytes: &[u8]) -> Result<()> {
        let worker = match &mut self.worker {
            Some(worker) => worker,
            none => none.insert(Worker::to(self.ucx, self.receiver.address)?),
        };
        // SAFETY: where one of both fails, the worker ends before the caller has its memory back.
        unsafe { worker.send(bytes, self.receiver.next) }?;
        worker.wait(stream)?;
        self.come.recv().map_err(|_| ErrorKind::ConnectionReset)?;
        stream.write_all(&self.receiver.next.to_le_bytes())?;
        self.receiver.next = self.receiver.next.wrapping_add(1);
        Ok(())
    }
}
