//! Sending without a copy into the kernel (`MSG_ZEROCOPY`): the memory itself is sent, and must not change until the
//! other side has it, which the kernel reports.
//!
//! It stops where nothing is gained. The kernel still copies for receivers on the same machine and for devices that
//! cannot gather, and reports that. It may also lack room for more completions or locked pages (`ulimit -l`) for a
//! while.

use std::io::{Error, ErrorKind, Result, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Bytes of a call: with more, some would be copied where few pages may be locked.
const CALL_BYTES: usize = 1 << 20;
/// Time to wait for the last completions of a connection that was shut down.
const LAST_COMPLETIONS: Duration = Duration::from_millis(200);
/// Shorter messages are copied, which costs less than locking their pages.
const MIN_BYTES: usize = 64 << 10;
// From `linux/errqueue.h`: origin and code of a completion.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;

/// A connection that sends without copies.
#[derive(Debug)]
pub(super) struct ZeroCopy<'a> {
    stream: &'a TcpStream,
    is_on: bool,
    /// Number of calls so far; the kernel numbers them, too.
    calls: u32,
    /// Number of calls whose memory is no longer in use, without a gap.
    ended: u32,
    /// Later calls that have ended before earlier ones: first and last of each run.
    ended_early: Vec<(u32, u32)>,
}

impl<'a> ZeroCopy<'a> {
    pub(super) fn new(stream: &'a TcpStream) -> Self {
        let on: libc::c_int = 1;
        // SAFETY: the option's value is an int that lives through the call.
        let result = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ZEROCOPY,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        Self { stream, is_on: result == 0, calls: 0, ended: 0, ended_early: Vec::new() }
    }

    /// Sends all bytes; returns a number for `has_ended`. Until that returns true the bytes may be read.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<u32> {
        let is_long = bytes.len() >= MIN_BYTES;
        while is_long && self.is_on && !bytes.is_empty() {
            let sent = self.send_some(&bytes[..bytes.len().min(CALL_BYTES)])?;
            bytes = &bytes[sent..];
            self.look()?;
        }
        let mut stream = self.stream;
        stream.write_all(bytes)?;
        Ok(self.calls)
    }

    /// Sends some of the bytes; without a copy if the kernel has room for that.
    fn send_some(&mut self, bytes: &[u8]) -> Result<usize> {
        // SAFETY: the bytes live through the call; callers keep them unchanged until `has_ended`.
        let sent = unsafe {
            libc::send(
                self.stream.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL,
            )
        };
        if let Ok(sent) = usize::try_from(sent) {
            self.calls = self.calls.wrapping_add(1);
            return Ok(sent);
        }
        let error = Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(0),
            Some(libc::ENOBUFS) => {
                let mut stream = self.stream;
                match stream.write(bytes) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
                    result => result,
                }
            }
            // Memory that cannot be locked, such as a driver's, or a connection that does not support it.
            Some(libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP) => {
                self.is_on = false;
                Ok(0)
            }
            _ => Err(error),
        }
    }

    /// Whether the bytes of the `send` that returned this number are no longer read.
    pub(super) fn has_ended(&self, calls: u32) -> bool {
        calls.wrapping_sub(self.ended).cast_signed() <= 0
    }

    /// Waits until the kernel reports something, or for `limit`; fails when the connection is shut down.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(super) fn wait(&mut self, limit: Duration) -> Result<()> {
        let mut poll = libc::pollfd { fd: self.stream.as_raw_fd(), events: 0, revents: 0 };
        let milliseconds = libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: one entry, which lives through the call.
        let result = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
        if result < 0 && Error::last_os_error().kind() != ErrorKind::Interrupted {
            return Err(Error::last_os_error());
        }
        let is_shut = poll.revents & (libc::POLLHUP | libc::POLLNVAL) != 0;
        if is_shut && !self.all_end()? { Err(ErrorKind::BrokenPipe.into()) } else { self.look() }
    }

    /// Whether all calls end soon after the connection was shut down. The kernel may report the receipt of bytes
    /// slightly later.
    fn all_end(&mut self) -> Result<bool> {
        let deadline = Instant::now() + LAST_COMPLETIONS;
        loop {
            self.look()?;
            if self.has_ended(self.calls) || Instant::now() > deadline {
                return Ok(self.has_ended(self.calls));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the connection at once: the kernel sends nothing more of the queued memory, and no longer reads it.
    pub(super) fn abandon(&mut self) {
        if self.has_ended(self.calls) {
            return;
        }
        // SAFETY: all of its fields may be zero.
        let mut nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
        nowhere.sa_family = libc::AF_UNSPEC as libc::sa_family_t;
        // SAFETY: an address of this length, which lives through the call. Connecting to AF_UNSPEC disconnects, which
        // discards the send queue.
        unsafe {
            libc::connect(
                self.stream.as_raw_fd(),
                &raw const nowhere,
                size_of::<libc::sockaddr>() as libc::socklen_t,
            )
        };
        // If that fails, or a call does not end, nothing more can be done.
        let _ended = self.all_end();
    }

    /// Reads the completions that the kernel has reported.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(super) fn look(&mut self) -> Result<()> {
        while !self.has_ended(self.calls) {
            match next_completion(self.stream)? {
                None => break,
                Some(Completion { first, last, was_copied }) => {
                    self.is_on &= !was_copied;
                    self.ended_early.push((first, last));
                    while let Some(place) =
                        self.ended_early.iter().position(|&(first, _)| first == self.ended)
                    {
                        self.ended = self.ended_early.swap_remove(place).1.wrapping_add(1);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Completion of one or more calls, whose memory is no longer in use.
struct Completion {
    first: u32,
    last: u32,
    /// Whether the kernel has copied the bytes nevertheless.
    was_copied: bool,
}

/// Reads the next completion of a connection, if there is one.
fn next_completion(stream: &TcpStream) -> Result<Option<Completion>> {
    /// Room for the headers and the value of one completion, aligned as the kernel requires.
    #[repr(C, align(8))]
    struct Control([u8; 128]);
    let mut control = Control([0; 128]);
    // SAFETY: all of its fields may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: the header and the memory that it refers to live through the call.
    let result = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_ERRQUEUE) };
    if result < 0 {
        let error = Error::last_os_error();
        return match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: the kernel has filled in the header and its memory.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: it is one of the message's headers.
        let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
        if matches!((level, kind), (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)) {
            // SAFETY: the value of such a header is a `sock_extended_err`, at any address.
            let found = unsafe {
                std::ptr::read_unaligned(libc::CMSG_DATA(header).cast::<libc::sock_extended_err>())
            };
            if found.ee_origin == SO_EE_ORIGIN_ZEROCOPY {
                let was_copied = found.ee_code & SO_EE_CODE_ZEROCOPY_COPIED != 0;
                return Ok(Some(Completion { first: found.ee_info, last: found.ee_data, was_copied }));
            }
        }
        // SAFETY: as for the first header.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::thread;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn what_is_sent_arrives_and_the_kernel_tells_when_it_is_over() {
        let (near, mut far) = pair();
        let data: Vec<u8> = (0..5 << 20).map(|place| (place % 251) as u8).collect();
        let reader = thread::spawn(move || {
            let mut found = Vec::new();
            far.read_to_end(&mut found).unwrap();
            found
        });
        let mut sender = ZeroCopy::new(&near);
        assert!(sender.is_on, "a Linux since 4.14");
        let calls = sender.send(&data).unwrap();
        assert!(calls >= 1);
        while !sender.has_ended(calls) {
            sender.wait(Duration::from_secs(60)).unwrap();
        }
        assert!(!sender.is_on, "on one machine the kernel copies, and says so");
        let after = sender.send(&data).unwrap();
        assert_eq!(after, calls, "from then on it is asked to");
        assert!(sender.has_ended(after));
        assert_eq!(sender.send(&data[..100]).unwrap(), calls);
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let found = reader.join().unwrap();
        assert!(found == [&data[..], &data, &data[..100]].concat());
    }

    #[test]
    fn notices_may_come_in_any_order() {
        let (near, _there) = pair();
        let mut sender = ZeroCopy::new(&near);
        (sender.calls, sender.ended) = (3, u32::MAX); // of calls MAX, 0, 1 and 2
        assert!(sender.has_ended(u32::MAX) && !sender.has_ended(0));
        sender.ended_early = vec![(1, 2)];
        sender.look().unwrap();
        assert!(!sender.has_ended(0));
        sender.ended = 1;
        assert!(sender.has_ended(1) && !sender.has_ended(3));
    }

    #[test]
    fn what_is_abandoned_is_sent_no_further() {
        let (near, mut far) = pair();
        let mut sender = ZeroCopy::new(&near);
        sender.calls = 1; // a call whose completion never arrives
        sender.abandon();
        assert_eq!(far.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_wait_ends_when_the_connection_is_shut() {
        let (near, far) = pair();
        let mut sender = ZeroCopy::new(&near);
        sender.calls = 1; // a call whose completion never arrives
        drop(far);
        near.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(sender.wait(Duration::from_secs(60)).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
