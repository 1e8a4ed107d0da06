//! Long messages over UCX: by RDMA if the network has it, or else by the transport that UCX selects.
//!
//! The connection of a message still carries requests and headers, and signals losses. It has a UCX worker at both
//! ends, which only its own threads use; no thread of UCX's moves bytes:
//!
//! ```text
//! receiver                                       sender
//!    │ hello … its worker's address ───────────►  │ connects to the worker
//!    │ request(tag, number, room) ─────────────►  │
//!    │  ◄────────────── header(tag, number, length)│ once it is ready
//!    │  ◄═════════════════════════ bytes, by UCX  │ the receiver reads them from the sender's memory
//!    │ has come(tag, number) ──────────────────►  │
//!    │  ◄───────────────────────────────── number │ the bytes were the message's until they had come
//! ```
//!
//! When the connection ends, both sides cancel: they end their workers, and only then report the message as failed. An
//! RDMA network, or the kernel, may still read a sender's memory then. The result is never taken for a message, as its
//! number is missing.

mod address;
mod ffi;
mod library;
mod worker;

pub(crate) use library::Ucx;

use super::wire::explain;
use crate::reachability::unpredictable;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use worker::Worker;

/// Shorter messages are sent on the connection itself, which is faster.
pub(super) const MIN_BYTES: usize = 64 << 10;
/// Size of the confirmation, which is a message's tag.
const WORD: usize = 8;

/// The receiving end of a connection.
pub(super) struct Receiver {
    /// None once a message has failed.
    worker: Option<Worker>,
    introduction: Vec<u8>,
    next: u64,
}

impl Receiver {
    /// Creates a receiver; the other side connects to it at the address of its connection.
    pub(super) fn new(ucx: &'static Ucx, stream: &TcpStream) -> Result<Self> {
        let worker = Worker::at(ucx, stream.local_addr()?.ip())?;
        let address = worker.address().map_or_else(String::new, |address| address.to_string());
        let tag = unpredictable();
        let introduction = [&tag[..], &[address.len() as u8], address.as_bytes()].concat();
        Ok(Self { worker: Some(worker), introduction, next: u64::from_le_bytes(tag) })
    }

    /// Bytes that the other side must read first.
    pub(super) fn introduction(&self) -> &[u8] {
        &self.introduction
    }

    /// Receives a message of this length. When it returns, nothing writes into the memory any more.
    pub(super) fn receive(&mut self, stream: &TcpStream, room: &mut [u8]) -> Result<()> {
        let result = self.receive_bytes(stream, room);
        if result.is_err() {
            self.worker = None;
        }
        result
    }

    fn receive_bytes(&mut self, stream: &TcpStream, room: &mut [u8]) -> Result<()> {
        let worker = self.worker.as_mut().ok_or(ErrorKind::ConnectionReset)?;
        // SAFETY: if either fails, the worker ends before the caller gets its memory back.
        unsafe { worker.receive(room, self.next) }?;
        let nbytes = worker.wait(stream)?;
        if nbytes == room.len() {
            Ok(())
        } else {
            Err(wrong("it has sent another message than it announced"))
        }
    }

    /// Waits for the sender's confirmation: the sender knows that the bytes have arrived and were the message's.
    pub(super) fn confirm(&mut self, mut stream: &TcpStream) -> Result<()> {
        let mut confirmed = [0; WORD];
        stream.read_exact(&mut confirmed)?;
        if u64::from_le_bytes(confirmed) != self.next {
            return Err(wrong("it has sent another message than it announced"));
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }
}

fn wrong(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// A receiver's introduction.
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
            address: address.ok_or_else(|| wrong("it has sent no address for UCX"))?,
        })
    }
}

/// The sending end of a connection.
pub(super) struct Sender {
    ucx: &'static Ucx,
    receiver: Introduction,
    /// Signals each arrival of a message; ends with the connection. UCX does not report arrivals: messages that it has
    /// sent may still be in transit, or lost with the other side.
    come: mpsc::Receiver<()>,
    /// None until there is a long message, and after one has failed.
    worker: Option<Worker>,
}

impl Sender {
    pub(super) fn new(ucx: &'static Ucx, receiver: Introduction, come: mpsc::Receiver<()>) -> Self {
        Self { ucx, receiver, come, worker: None }
    }

    /// Sends a message whose header was sent before. When it returns, nothing in this process reads the bytes any more.
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
        // SAFETY: if either fails, the worker ends before the caller gets its memory back.
        unsafe { worker.send(bytes, self.receiver.next) }?;
        worker.wait(stream)?;
        self.come.recv().map_err(|_| ErrorKind::ConnectionReset)?;
        stream.write_all(&self.receiver.next.to_le_bytes())?;
        self.receiver.next = self.receiver.next.wrapping_add(1);
        Ok(())
    }
}
