//! Wire format: introduction of a connection, with proof of the job's secret from both sides; requests; headers of
//! messages.

use crate::reachability::unpredictable;
use crate::secret::{Secret, TAG_BYTES};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Beginning of every connection: the name and version of the format.
const MAGIC: [u8; 8] = *b"evermoe2";
const HELLO_BYTES: usize = 40;
const ANSWER_BYTES: usize = 16;

/// Introduction of the side that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The group of both.
    pub(super) group: u64,
    /// Rank of the member that connects, and that will receive.
    pub(super) rank: u64,
    /// Whether it receives the bytes of long messages by UCX.
    pub(super) by_ucx: bool,
}

impl Hello {
    /// Fails if the other side uses another transport.
    pub(super) fn check_same(self, theirs: bool) -> std::io::Result<()> {
        if self.by_ucx == theirs {
            return Ok(());
        }
        let name = |by_ucx| if by_ucx { "ucx" } else { "tcp" };
        let (mine, theirs) = (name(self.by_ucx), name(theirs));
        let text = format!(
            "its transport is {theirs:?} and this member's {mine:?}: expected the same on all members of a job"
        );
        Err(Error::new(ErrorKind::InvalidInput, text))
    }
}

/// Introduces this member to the one that it has connected to.
pub(super) fn greet(
    stream: &mut (impl Read + Write),
    hello: Hello,
    secret: Option<&Secret>,
) -> std::io::Result<()> {
    let number = unpredictable();
    let by_ucx = u64::from(hello.by_ucx).to_le_bytes();
    let parts = [MAGIC, hello.group.to_le_bytes(), hello.rank.to_le_bytes(), by_ucx, number];
    stream.write_all(&parts.concat())?;
    let mut theirs = [0; ANSWER_BYTES];
    stream.read_exact(&mut theirs)?;
    if let Some(secret) = secret {
        check(stream, secret, "transport answer", &parts.concat(), &theirs)?;
        stream.write_all(&secret.tag("transport hello", &[&parts.concat(), &theirs]))?;
    }
    hello.check_same(theirs[8..] != [0; 8])
}

/// Reads an introduction, and reports whether this member moves bytes by UCX.
pub(super) fn welcome(
    stream: &mut (impl Read + Write),
    by_ucx: bool,
    secret: Option<&Secret>,
) -> std::io::Result<Hello> {
    let mut said = [0; HELLO_BYTES];
    stream.read_exact(&mut said)?;
    let [magic, group, rank, theirs] = [0, 8, 16, 24].map(|at| {
        let mut word = [0; 8];
        word.copy_from_slice(&said[at..at + 8]);
        word
    });
    if magic != MAGIC {
        return Err(Error::new(ErrorKind::InvalidData, "the peer is no member with this version of evermoe"));
    }
    let number = [unpredictable(), u64::from(by_ucx).to_le_bytes()].concat();
    stream.write_all(&number)?;
    if let Some(secret) = secret {
        stream.write_all(&secret.tag("transport answer", &[&said, &number]))?;
        check(stream, secret, "transport hello", &said, &number)?;
    }
    Ok(Hello { group: u64::from_le_bytes(group), rank: u64::from_le_bytes(rank), by_ucx: theirs != [0; 8] })
}

fn check(
    stream: &mut impl Read,
    secret: &Secret,
    purpose: &str,
    hello: &[u8],
    number: &[u8],
) -> std::io::Result<()> {
    let mut tag = [0; TAG_BYTES];
    stream.read_exact(&mut tag)?;
    if secret.is_tag(&tag, purpose, &[hello, number]) {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::PermissionDenied, "the peer does not have the job's secret"))
    }
}

/// A connection on which reads and writes share one time limit.
pub(super) struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    /// Runs `talk` within the limit; afterwards the connection has no timeout.
    pub(super) fn talk<T>(
        stream: &'a TcpStream,
        limit: Duration,
        talk: impl FnOnce(&mut Self) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        stream.set_nodelay(true)?;
        let said = talk(&mut Self { stream, deadline: Instant::now() + limit })?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok(said)
    }

    fn left(&self) -> std::io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// Request of a message: its tag, the number of earlier messages with that tag, and the size of the memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) tag: u64,
    pub(super) number: u64,
    pub(super) room: u64,
}

/// Used in place of the size: not a request, but the report that a long message has arrived. No memory is that large.
pub(super) const HAS_COME: u64 = u64::MAX;

/// Size of a request, and of the header of a message, which has its length in place of the memory's size.
const WORDS: usize = 24;

impl Request {
    pub(super) fn to_bytes(self) -> [u8; WORDS] {
        let mut bytes = [0; WORDS];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.tag, self.number, self.room]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads the next request; none at the end of the connection.
    pub(super) fn read(mut stream: &TcpStream) -> std::io::Result<Self> {
        let mut bytes = [0; WORDS];
        stream.read_exact(&mut bytes).map_err(explain)?;
        let [tag, number, room] = [0, 8, 16].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        });
        Ok(Self { tag, number, room })
    }
}

/// Converts an error of a connection into a readable one.
pub(super) fn explain(error: Error) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            Error::new(error.kind(), "it has closed its connections")
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            Error::new(ErrorKind::TimedOut, "it has not answered in time")
        }
        _ => error,
    }
}
