//! Stand-in for `ucx` in a build without that feature: its types have no values.

use crate::error::{Error, Result};
use std::convert::Infallible;
use std::io::Read;
use std::net::TcpStream;
use std::sync::mpsc;

pub(super) const MIN_BYTES: usize = usize::MAX;

/// The library; has no value.
#[derive(Debug)]
pub(crate) struct Ucx(Infallible);

impl Ucx {
    pub(crate) fn open(_libraries: &[String]) -> Result<&'static Self> {
        Err(Error::invalid(
            "transport: \"ucx\" needs a build with the feature `ucx`, and this one has none: build with it, or use \
             transport \"tcp\"",
        ))
    }
}

/// The receiving end of a connection; has no value.
pub(super) struct Receiver(Infallible);

impl Receiver {
    pub(super) fn new(ucx: &'static Ucx, _stream: &TcpStream) -> std::io::Result<Self> {
        match ucx.0 {}
    }

    pub(super) fn introduction(&self) -> &[u8] {
        match self.0 {}
    }

    pub(super) fn receive(&mut self, _stream: &TcpStream, _room: &mut [u8]) -> std::io::Result<()> {
        match self.0 {}
    }

    pub(super) fn confirm(&mut self, _stream: &TcpStream) -> std::io::Result<()> {
        match self.0 {}
    }
}

/// The introduction of a receiver; has no value.
pub(super) struct Introduction(Infallible);

impl Introduction {
    pub(super) fn read(_stream: &mut impl Read) -> std::io::Result<Self> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// The sending end of a connection; has no value.
pub(super) struct Sender(Infallible);

impl Sender {
    pub(super) fn new(_ucx: &'static Ucx, receiver: Introduction, _come: mpsc::Receiver<()>) -> Self {
        match receiver.0 {}
    }

    pub(super) fn send(&mut self, _stream: &TcpStream, _bytes: &[u8]) -> std::io::Result<()> {
        match self.0 {}
    }
}
