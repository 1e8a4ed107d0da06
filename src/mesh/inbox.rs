//! Messages of one member as they come: into the memory that awaits them, or kept for later.

use super::bytes::Bytes;
use super::{HEADER_BYTES, Header};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;

/// Bytes that are read at once, so that a small message takes one call of the system. What is left of a longer one is
/// read into its memory.
const BUFFER_BYTES: usize = 16 << 10;

/// A message that is sent or awaited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) bytes: Bytes,
}

/// Why a member's messages cannot be read.
#[derive(Debug)]
pub(super) enum Stop {
    /// The connection is closed, or broken.
    Closed,
    /// The member is in another collective.
    Elsewhere,
}

/// Where the message goes that is being read.
#[derive(Debug)]
enum Target {
    /// The rest of the memory of the first awaited message.
    Awaited(Bytes),
    Kept(Header, Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    target: Option<Target>,
    kept: VecDeque<(Header, Vec<u8>)>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Self { buffer, start: 0, end: 0, target: None, kept: VecDeque::new() }
    }

    /// Reads once, and takes the awaited messages that are complete from `awaited`.
    pub(super) fn read(&mut self, mut stream: &TcpStream, awaited: &mut VecDeque<Frame>) -> Result<(), Stop> {
        let is_empty = self.start == self.end;
        let result = match &mut self.target {
            Some(Target::Awaited(rest)) if is_empty && rest.length >= BUFFER_BYTES => {
                // SAFETY: the call that awaits the message has exclusive memory for it, as `Mesh`'s functions require.
                let read = stream.read(unsafe { rest.as_mut_slice() });
                read.inspect(|&n| *rest = rest.skip(n))
            }
            _ => {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                let read = stream.read(&mut self.buffer[self.end..]);
                read.inspect(|&n| self.end += n)
            }
        };
        match result {
            Ok(0) => Err(Stop::Closed),
            Ok(_) => self.take(awaited),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(_) => Err(Stop::Closed),
        }
    }

    /// Takes the awaited messages that have come by now from `awaited`.
    pub(super) fn take(&mut self, awaited: &mut VecDeque<Frame>) -> Result<(), Stop> {
        loop {
            self.take_kept(awaited)?;
            match &mut self.target {
                Some(Target::Awaited(rest)) => {
                    let n = rest.length.min(self.end - self.start);
                    // SAFETY: as above.
                    unsafe { rest.first(n).as_mut_slice() }
                        .copy_from_slice(&self.buffer[self.start..self.start + n]);
                    self.start += n;
                    *rest = rest.skip(n);
                    if rest.length > 0 {
                        return Ok(());
                    }
                    self.target = None;
                    awaited.pop_front();
                }
                Some(Target::Kept(header, bytes)) => {
                    let left = usize::try_from(header.length).unwrap_or(usize::MAX) - bytes.len();
                    let n = left.min(self.end - self.start);
                    bytes.extend_from_slice(&self.buffer[self.start..self.start + n]);
                    self.start += n;
                    if n < left {
                        return Ok(());
                    }
                    let kept = (*header, std::mem::take(bytes));
                    self.target = None;
                    self.kept.push_back(kept);
                }
                None => {
                    let Some(front) = awaited.front() else { return Ok(()) };
                    let Some((header, _)) =
                        self.buffer[self.start..self.end].split_first_chunk::<HEADER_BYTES>()
                    else {
                        return Ok(());
                    };
                    let header = Header::from_bytes(*header);
                    self.target = Some(if header.tag == front.header.tag {
                        check(header, front.header)?;
                        Target::Awaited(front.bytes)
                    } else if header.is_collective() && front.header.is_collective() {
                        return Err(Stop::Elsewhere);
                    } else {
                        Target::Kept(header, Vec::new())
                    });
                    self.start += HEADER_BYTES;
                }
            }
        }
    }

    /// Takes awaited messages from those that were kept, in the order of each tag.
    fn take_kept(&mut self, awaited: &mut VecDeque<Frame>) -> Result<(), Stop> {
        while self.target.is_none()
            && let Some(front) = awaited.front()
            && let Some(at) = self.kept.iter().position(|(header, _)| header.tag == front.header.tag)
        {
            check(self.kept[at].0, front.header)?;
            if let Some((_, bytes)) = self.kept.remove(at) {
                // SAFETY: as above.
                unsafe { front.bytes.as_mut_slice() }.copy_from_slice(&bytes);
            }
            awaited.pop_front();
        }
        Ok(())
    }
}

/// Fails if a message of the awaited tag is another one.
fn check(header: Header, awaited: Header) -> Result<(), Stop> {
    if header == awaited { Ok(()) } else { Err(Stop::Elsewhere) }
}
